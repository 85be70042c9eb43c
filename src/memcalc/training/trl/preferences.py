"""Learning from judged completions: DPO from pairs, KTO from single ones that are good or bad.

Source: `DPOTrainer._compute_loss` and `KTOTrainer._compute_loss` of TRL 1.16 (trl/trainer). The reference passes while
the graph of the trained model lives, with checkpointing off.
"""

from __future__ import annotations

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.tables.dtypes import BOOL, FP32
from memcalc.training.objectives.rollout import LOSS, Rollout
from memcalc.training.trl.scoring import input_ids, masked_labels, score, score_frozen


def dpo(rollout: Rollout) -> Tensor:
    """The sigmoid loss of b pairs, 2b sequences, the chosen ones first."""
    ids = input_ids(rollout, 2 * rollout.setup.batch)
    labels = masked_labels(ids)
    log_probs, *_metrics = score(rollout, ids, ("entropy", "mean_logits", "is_top1"))
    with rollout.tape.scoped(LOSS):
        chosen, rejected = ops.chunk(ops.sum(log_probs, 1), 2, 0)
    if rollout.frozen is None:
        known = [rollout.input_tensor(rollout.setup.batch, dtype=FP32, name="log-probabilities") for _ in range(2)]
    else:
        with rollout.tape.no_grad():
            reference = score_frozen(rollout, ids)
            with rollout.tape.scoped(LOSS):
                known = ops.chunk(ops.sum(reference, 1), 2, 0)
    del labels
    with rollout.tape.scoped(LOSS):
        delta = ops.sub(ops.sub(chosen, known[0]), ops.sub(rejected, known[1]))
        return ops.mean(ops.neg(ops.log_sigmoid(ops.mul_scalar(delta))), 0, keepdim=False)


def kto(rollout: Rollout) -> Tensor:
    """The loss of b single completions, half of them good, with a pass for the KL estimate of each model."""
    rows = rollout.sequences
    ids, other = input_ids(rollout, rows), input_ids(rollout, rows)
    rollout.input_tensor(rows, dtype=BOOL, name="labels of completions")
    _known_kl = _kl_pass(rollout, other, frozen=False)
    labels = masked_labels(ids)
    log_probs, *_metrics = score(rollout, ids, ("entropy", "mean_logits"))
    with rollout.tape.scoped(LOSS):
        sums = ops.sum(log_probs, 1)
    with rollout.tape.no_grad():
        _reference_kl = _kl_pass(rollout, other, frozen=True)
        reference = score_frozen(rollout, ids)
        with rollout.tape.scoped(LOSS):
            known = ops.sum(reference, 1)
    del labels
    with rollout.tape.scoped(LOSS):
        ratio = ops.sub(sums, known)
        return ops.mean(ops.add_scalar(ops.sigmoid(ops.mul_scalar(ratio))), 0, keepdim=False)


def _kl_pass(rollout: Rollout, ids: Tensor, *, frozen: bool) -> Tensor:
    """Log-probabilities [b] of mismatched completions, outside the graph."""
    with rollout.tape.no_grad():
        labels = masked_labels(ids)
        per_token = score_frozen(rollout, ids) if frozen else score(rollout, ids, ("entropy", "mean_logits"))[0]
        del labels
        with rollout.tape.scoped(LOSS):
            return ops.sum(per_token, 1)
