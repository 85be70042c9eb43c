"""Learning a teacher's distribution over the next token of completions, over the whole vocabulary.

Source: DistillationTrainer of TRL 1.12 without its fused loss, with its default divergence (beta 1: the reverse KL).
"""

from __future__ import annotations

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.errors import UsageError
from memcalc.nn.run_context import run_context
from memcalc.tables.dtypes import FP32
from memcalc.training.objectives.log_probabilities import where
from memcalc.training.objectives.rollout import LOSS, Rollout


def distillation(rollout: Rollout) -> Tensor:
    """The loss of completions. Both models compute the logits of all tokens, and both stand until the loss is there."""
    rows, completion = rollout.sequences, rollout.completion
    prompt, answer = rollout.input_tensor(rows, rollout.length - completion), rollout.input_tensor(rows, completion)
    prompt_mask, mask = rollout.input_tensor(rows, rollout.length - completion), rollout.input_tensor(rows, completion)
    count = ops.mul_scalar(ops.empty_like(rollout.input_tensor(), FP32))
    ids, padding = ops.cat([prompt, answer], 1), ops.cat([prompt_mask, mask], 1)
    run_context(rollout.tape).padding = padding
    outputs = rollout.run(ids)
    with rollout.tape.no_grad():
        teacher = rollout.run_frozen(ids).returned[0]
    run_context(rollout.tape).padding = None
    check_vocabulary(outputs.returned[0].shape[-1], teacher.shape[-1])
    with rollout.tape.scoped(LOSS):
        student = ops.narrow(outputs.returned[0], 1, completion)
        teacher = ops.narrow(teacher, 1, completion)
        divergence = _reverse_kl(student, teacher)
        divergence = where(divergence, mask, rows * completion)
        total = ops.sum(ops.reshape(divergence, -1), 0)
        return ops.div(total, count)


def check_vocabulary(own: int, other: int) -> None:
    """Raise UsageError where the student has another vocabulary than the teacher."""
    if own != other:
        raise UsageError(
            f"the teacher has logits of {other} tokens and the student of {own}, so they cannot be compared; choose a "
            "teacher with the same vocabulary."
        )


def _reverse_kl(student: Tensor, teacher: Tensor) -> Tensor:
    """KL of logits [b, c, V] divided by the temperature, element by element: p · (log p - log q)."""
    student = ops.mul_scalar(student)
    teacher = ops.mul_scalar(teacher)
    log_p, log_q = ops.log_softmax(student), ops.log_softmax(teacher)
    difference = ops.sub(log_p, log_q)
    return ops.mul(ops.exp(log_p), difference)
