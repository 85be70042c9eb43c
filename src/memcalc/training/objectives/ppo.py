"""PPO: a policy and a value model, trained together on completions that were generated before.

Source: PPOTrainer of TRL (trl.experimental.ppo), one micro-batch of its update. Rollouts, rewards and the entropy that
it logs after the step are left out.
"""

from __future__ import annotations

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.tables.dtypes import BOOL, FP32, INT64
from memcalc.training.objectives.log_probabilities import selected
from memcalc.training.objectives.rollout import LOSS, Rollout


def ppo(rollout: Rollout) -> Tensor:
    """The loss of completions with advantages, returns and values. Both models see all tokens, and the trainer's
    variables, hidden states among them, stand until the optimizer has stepped.
    """
    rows, completion = rollout.sequences, rollout.completion
    ids, answer = rollout.input_tensor(rows, rollout.length), rollout.input_tensor(rows, completion)
    masks = [rollout.input_tensor(rows, completion, dtype=BOOL, name="masks") for _ in range(2)]
    old = rollout.input_tensor(rows, completion, dtype=rollout.logits_dtype, name="log-probabilities")
    returns, before, advantages = (
        rollout.input_tensor(rows, completion, dtype=FP32, name="returns, values, advantages") for _ in range(3)
    )
    outputs, values = rollout.run_policy_and_value(ids)
    with rollout.tape.scoped(LOSS):
        whole, logits = ops.mul_slice_(outputs.returned[0], 1, completion)
        chosen = ops.masked_fill(selected(logits, answer), masks[0])
        own = ops.masked_fill(ops.squeeze(ops.narrow(values, 1, completion), -1), masks[1])
        of_values = _of_values(rollout, own, before, returns, masks[1])
        of_policy = _of_policy(rollout, chosen, old, advantages, masks[0])
        loss = ops.add(of_policy, ops.mul_scalar(of_values))
    rollout.kept_until_step += [(tensor, 1) for tensor in (whole, values, chosen, own, of_values, of_policy, loss)]
    return loss


def _of_values(rollout: Rollout, own: Tensor, before: Tensor, returns: Tensor, mask: Tensor) -> Tensor:
    """Half the squared distance of values [b, c] from returns, clipped."""
    clipped = ops.clamp_tensor(own, ops.add_scalar(before), ops.add_scalar(before))
    one = ops.pow(ops.sub(own, returns))
    two = ops.pow(ops.sub(clipped, returns))
    largest = ops.maximum(one, two)
    rollout.kept_until_step += [(tensor, 1) for tensor in (clipped, one, two, largest)]
    return ops.mul_scalar(_masked_mean(largest, ops.compare(mask)))


def _of_policy(rollout: Rollout, chosen: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """The clipped loss of log-probabilities [b, c]."""
    difference = ops.sub(chosen, old)
    ratio = ops.exp(difference)
    one = ops.mul(ops.neg(advantages), ratio)
    two = ops.mul(ops.neg(advantages), ops.clamp(ratio))
    largest = ops.maximum(one, two)
    rollout.kept_until_step += [(tensor, 1) for tensor in (difference, ratio, one, two, largest)]
    return _masked_mean(largest, ops.compare(mask))


def _masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    total = ops.sum(ops.reshape(ops.mul(x, mask), -1), 0)
    return ops.div(total, ops.sum(ops.reshape(mask, -1), 0, dtype=INT64))
