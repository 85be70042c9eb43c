"""Policy gradients on completions that were generated before the step: GRPO and RLOO.

Source: `_compute_loss`, `_get_per_token_logps_and_entropies` and `_buffered_inputs` of GRPOTrainer and RLOOTrainer in
TRL 1.16. Log-probabilities of the reference are computed before the trained model's graph exists.
"""

from __future__ import annotations

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.nn.run_context import run_context
from memcalc.tables.dtypes import FP32
from memcalc.training.objectives.rollout import LOSS, Rollout
from memcalc.training.trl.scoring import masked_labels, score, score_frozen


def grpo(rollout: Rollout) -> Tensor:
    """The clipped loss of completions token by token."""
    ids, labels = _inputs(rollout)
    known = _reference(rollout, ids)
    log_probs, _entropy, *_mask = score(rollout, ids, ("entropy",))
    del labels
    with rollout.tape.scoped(LOSS):
        own = ops.cat([ops.narrow(log_probs, 1, rollout.completion)], 0)
        old = (
            own.detach()
            if _on_policy(rollout)
            else rollout.input_tensor(*own.shape, dtype=FP32, name="log-probabilities")
        )
        advantages = rollout.input_tensor(own.shape[0], 1, dtype=FP32, name="advantages")
        ratio = ops.exp(ops.sub(own, old))
        clipped = ops.clamp(ratio)
        per_token = ops.neg(ops.minimum(ops.mul(ratio, advantages), ops.mul(clipped, advantages)))
        if known is not None:
            difference = ops.sub(known, own)
            penalty = ops.add_scalar(ops.sub(ops.exp(difference), difference))
            per_token = ops.add(per_token, ops.mul_scalar(penalty))
        run_context(rollout.tape).padding = None
        return ops.div(ops.sum(ops.reshape(per_token, -1), 0), rollout.tape.empty((), FP32))


def rloo(rollout: Rollout) -> Tensor:
    """The clipped loss of completions as wholes."""
    ids, labels = _inputs(rollout)
    with rollout.tape.no_grad():  # the old log-probabilities, which stay in the buffer
        score(rollout, ids, ("entropy",))
        if rollout.frozen is not None:
            score_frozen(rollout, ids)
    log_probs, _entropy, *_mask = score(rollout, ids, ("entropy",))
    del labels
    with rollout.tape.scoped(LOSS):
        own = ops.cat([ops.narrow(log_probs, 1, rollout.completion)], 0)
        sums = ops.sum(own, 1)
        ratio = ops.exp(ops.sub(sums, rollout.input_tensor(sums.shape[0], dtype=FP32, name="log-probabilities")))
        advantages = rollout.input_tensor(sums.shape[0], dtype=FP32, name="advantages")
        losses = ops.minimum(ops.mul(ratio, advantages), ops.mul(ops.clamp(ratio), advantages))
        run_context(rollout.tape).padding = None
        return ops.mean(ops.neg(losses), 0, keepdim=False)


def _on_policy(rollout: Rollout) -> bool:
    """Whether each generation is used for one update, so that old log-probabilities are the present ones."""
    return True


def _inputs(rollout: Rollout) -> tuple[Tensor, Tensor]:
    """Ids [b, s] joined from prompts and completions, and labels; the parts and the masks stay in the buffer."""
    rows, completion = rollout.sequences, rollout.completion
    prompt, answer = rollout.input_tensor(rows, rollout.length - completion), rollout.input_tensor(rows, completion)
    prompt_mask, mask = rollout.input_tensor(rows, rollout.length - completion), rollout.input_tensor(rows, completion)
    ids = ops.cat([prompt, answer], 1)
    run_context(rollout.tape).padding = ops.cat([prompt_mask, mask], 1)
    return ids, masked_labels(ids)


def _reference(rollout: Rollout, ids: Tensor) -> Tensor | None:
    """Log-probabilities [b, c] of the reference, made before the trained model runs; they stay in the buffer."""
    if rollout.frozen is None:
        return None
    with rollout.tape.no_grad():
        score_frozen(rollout, ids)
    return rollout.input_tensor(ids.shape[0], rollout.completion, dtype=FP32, name="log-probabilities")
