"""Learning from pairs, a chosen and a rejected completion: DPO, and the reward model of Bradley and Terry.

A micro-batch of b pairs is 2b sequences, the chosen ones first. Dropout is off (`disable_dropout`).
Source: trl/trainer/{dpo,reward}_trainer.py of TRL 1.12, with its defaults (the sigmoid loss).
"""

from __future__ import annotations

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.errors import UsageError
from memcalc.tables.dtypes import FP32, INT64
from memcalc.training.objectives.log_probabilities import entropy, selected, where
from memcalc.training.objectives.rollout import LOSS, Rollout


def dpo(rollout: Rollout) -> Tensor:
    """The loss of pairs. The logits of both models stand until all is logged."""
    pairs, length = rollout.setup.batch, rollout.length
    ids, mask = rollout.input_tensor(2 * pairs, length), rollout.input_tensor(2 * pairs, length)
    known = [rollout.input_tensor(pairs, dtype=FP32) for _ in range(2)] if rollout.frozen is None else None
    outputs = rollout.run(ids)
    with rollout.tape.scoped(LOSS):
        shifted_logits = ops.contiguous(ops.narrow(outputs.returned[0], 1, length - 1))
        labels = ops.contiguous(ops.narrow(ids, 1, length - 1))
        shifted_mask = ops.contiguous(ops.narrow(mask, 1, length - 1))
        per_token = _of_completions(selected(shifted_logits, labels), shifted_mask)
        sums = ops.sum(per_token, 1)
        chosen, rejected = ops.chunk(sums, 2, 0)
    if known is not None:
        return _compared(rollout, shifted_logits, shifted_mask, [chosen, rejected], known)
    with rollout.tape.no_grad():
        reference = rollout.run_frozen(ids)
    with rollout.tape.scoped(LOSS):
        reference_logits = ops.contiguous(ops.narrow(reference.returned[0], 1, length - 1))
        reference_per_token = _of_completions(selected(reference_logits, labels), shifted_mask)
        reference_sums = ops.sum(reference_per_token, 1)
        known = ops.chunk(reference_sums, 2, 0)
    return _compared(rollout, shifted_logits, shifted_mask, [chosen, rejected], known)


def _of_completions(per_token: Tensor, mask: Tensor) -> Tensor:
    """Log-probabilities [b, s] with zeros, put in place, outside of completions."""
    return ops.masked_fill_(per_token, ops.compare(mask))


def _compared(rollout: Rollout, logits: Tensor, mask: Tensor, own: list[Tensor], known: list[Tensor]) -> Tensor:
    """The loss of log-probabilities [b] of chosen and rejected completions, and the statistics that are logged."""
    with rollout.tape.scoped(LOSS):
        _chosen, _rejected = (ops.sub(mine, theirs) for mine, theirs in zip(own, known, strict=True))
        _difference = ops.sub(_chosen, _rejected)
        _each = ops.neg(ops.log_sigmoid(ops.mul_scalar(_difference)))
        loss = ops.add_scalar(ops.mul_scalar(ops.mean(_each, 0, keepdim=False)))
        _logged = _statistics(rollout, logits.detach(), mask)
    return loss


def _statistics(rollout: Rollout, logits: Tensor, mask: Tensor) -> list[Tensor]:
    """Entropy, mean logits and predictions of the completions."""
    count = rollout.setup.batch * rollout.completion
    entropies = entropy(logits)
    kept = [entropies, ops.mean(where(entropies, mask, 2 * count), 0, keepdim=False)]
    halves = ops.chunk(logits, 2, 0)
    for half, own in zip(halves, ops.chunk(mask, 2, 0), strict=True):
        means = ops.mean(where(half, own, count), -1, keepdim=False)
        kept.append(ops.sum(means, 0))
        del means
        kept.append(ops.sum(ops.reshape(own, -1), 0))
    kept.append(logits.tape.empty(halves[0].shape[:-1], INT64))  # the most probable tokens
    return kept


def reward(rollout: Rollout) -> Tensor:
    """The loss of rewards [2b, 1]: how much more the chosen ones get."""
    ids = rollout.input_tensor(2 * rollout.setup.batch, rollout.length)
    if rollout.setup.trainer_used == "trl":
        rollout.input_tensor(*ids.shape, name="padding mask")
    outputs = rollout.run(ids)
    if outputs.returned[0].shape[1:] != (1,):
        raise UsageError(
            "--objective reward needs a head of one score for a sequence, which this family has none of as memcalc "
            "knows it; name its language model, or another one."
        )
    with rollout.tape.scoped("head and loss"):
        chosen, rejected = ops.chunk(ops.squeeze(outputs.returned[0], -1), 2, 0)
        return ops.mean(ops.neg(ops.log_sigmoid(ops.sub(chosen, rejected))), 0, keepdim=False)
