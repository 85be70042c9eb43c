"""Trainers of trl.experimental that still make full logits: ORPO, CPO and GKD.

Source: trl/experimental/{orpo,cpo,gkd} of TRL 1.16, with their default losses.
"""

from __future__ import annotations

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.nn.kv_cache import Cache
from memcalc.nn.run_context import run_context
from memcalc.tables.dtypes import FP32
from memcalc.training.objectives.rollout import LOSS, Rollout
from memcalc.training.trl.scoring import input_ids


def orpo(rollout: Rollout) -> Tensor:
    """The odds ratio of pairs beside the loss of the chosen ones. Logits stand until all is logged."""
    pairs, length = rollout.setup.batch, rollout.length
    ids = input_ids(rollout, 2 * pairs)
    outputs = rollout.run(ids)
    with rollout.tape.scoped(LOSS):
        logits = outputs.returned[0]
        nll = _chosen_loss(logits, ids, pairs)
        averages = _log_probs(logits, ids, length)
        chosen, rejected = ops.chunk(averages, 2, 0)
        odds = ops.sub(ops.sub(chosen, rejected), ops.sub(ops.exp(chosen), ops.exp(rejected)))
        _metrics = outputs
        return ops.sub(nll, ops.mean(ops.mul_scalar(ops.log_sigmoid(odds)), 0, keepdim=False))


def cpo(rollout: Rollout) -> Tensor:
    """The difference of pairs beside the loss of the chosen ones."""
    pairs, length = rollout.setup.batch, rollout.length
    ids = input_ids(rollout, 2 * pairs)
    outputs = rollout.run(ids)
    with rollout.tape.scoped(LOSS):
        logits = outputs.returned[0]
        nll = _chosen_loss(logits, ids, pairs)
        sums = _log_probs(logits, ids, length)
        chosen, rejected = ops.chunk(sums, 2, 0)
        losses = ops.neg(ops.log_sigmoid(ops.mul_scalar(ops.sub(chosen, rejected))))
        return ops.add(ops.mean(losses, 0, keepdim=False), ops.mul_scalar(nll))


def _chosen_loss(logits: Tensor, ids: Tensor, pairs: int) -> Tensor:
    """Cross-entropy of the chosen half, whose shifted logits are copied."""
    shifted = ops.contiguous(ops.narrow(ops.narrow(logits, 0, pairs), 1, logits.shape[1] - 1))
    labels = ops.contiguous(ops.narrow(ops.narrow(ids, 0, pairs), 1, ids.shape[1] - 1))
    return ops.cross_entropy(ops.view(shifted, -1, shifted.shape[-1]), ops.view(labels, -1))


def _log_probs(logits: Tensor, ids: Tensor, length: int) -> Tensor:
    """Log-probabilities [2b] of sequences: TRL's kernel keeps the logits and vectors over tokens."""
    labels = ops.empty_like(ops.narrow(ids, 1, length - 1))
    per_token = ops.fused_log_probs(ops.narrow(logits, 1, length - 1), labels)
    return ops.sum(per_token, 1)


def gkd(rollout: Rollout) -> Tensor:
    """The generalised Jensen-Shannon divergence (beta 0.5) of all tokens, over the whole vocabulary."""
    ids = input_ids(rollout, rollout.sequences)
    outputs = rollout.run(ids)
    run = run_context(rollout.tape)
    with rollout.tape.no_grad():
        _teacher_cache = run.cache = Cache()  # its config has use_cache, and its outputs keep the cache
        run.all_logits = True
        teacher_outputs = rollout.run_frozen(ids)
        run.cache, run.all_logits = None, False
    with rollout.tape.scoped(LOSS):
        student = ops.mul_scalar(ops.narrow(outputs.returned[0], 1, rollout.length - 1))
        teacher = ops.mul_scalar(ops.narrow(teacher_outputs.returned[0], 1, rollout.length - 1))
        log_p, log_q = ops.log_softmax(student), ops.log_softmax(teacher)
        mixture = ops.logsumexp(ops.stack([ops.add_scalar(log_p), ops.add_scalar(log_q)], 0), 0)
        kl_teacher, kl_student = _kl_div(mixture, log_q), _kl_div(mixture, log_p)
        divergence = ops.add(ops.mul_scalar(kl_teacher), ops.mul_scalar(kl_student))
        return ops.div(ops.sum(ops.reshape(divergence, -1), 0), rollout.tape.empty((), FP32))


def _kl_div(log_probs: Tensor, log_target: Tensor) -> Tensor:
    """`torch.nn.functional.kl_div(..., log_target=True)` element by element."""
    return ops.mul(ops.exp(log_target), ops.sub(log_target, log_probs))
