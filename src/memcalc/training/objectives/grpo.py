"""Policy gradients on completions that were generated before: GRPO.

Source: trl/trainer/grpo_trainer.py of TRL 1.12, with its defaults (the loss "dapo"), and with log-probabilities of the
policy that generated the completions.
"""

from __future__ import annotations

from collections.abc import Callable

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.nn.model import Outputs
from memcalc.nn.run_context import run_context
from memcalc.tables.dtypes import FP32
from memcalc.training.objectives.log_probabilities import entropy, selected
from memcalc.training.objectives.rollout import LOSS, Rollout


def grpo(rollout: Rollout) -> Tensor:
    """The loss of completions, whose advantages are given. Logits are computed for the completions alone."""
    rows, completion = rollout.sequences, rollout.completion
    prompt, answer = rollout.input_tensor(rows, rollout.length - completion), rollout.input_tensor(rows, completion)
    known = _scored(rollout, prompt, answer)
    return _clipped(rollout, prompt, answer, known)


def _scored(rollout: Rollout, prompt: Tensor, answer: Tensor) -> Tensor | None:
    """Log-probabilities [b, c] of the reference, computed before the step or long before."""
    if rollout.setup.reference_used == "precomputed":
        return rollout.input_tensor(*answer.shape, dtype=rollout.logits_dtype, name="log-probabilities")
    if rollout.frozen is None:
        return None
    ids, padding = _joined(prompt, answer), _joined(prompt, answer)
    with rollout.tape.no_grad():
        return log_probabilities(rollout.run_frozen, ids, padding, answer.shape[1], entropies=False)[0]


def _joined(prompt: Tensor, answer: Tensor) -> Tensor:
    return ops.cat([prompt, answer], 1)


def log_probabilities(
    run: Callable[[Tensor, int], Outputs], ids: Tensor, mask: Tensor, completion: int, *, entropies: bool
) -> tuple[Tensor, Tensor | None]:
    """Log-probabilities [b, c] of the last `completion` tokens of ids [b, s], and entropies where asked for.

    The logits as the model gave them, and divided by the temperature, stand until both are there.
    """
    batch_ids, run_context(ids).padding = ops.narrow(ids, 0, ids.shape[0]), ops.narrow(mask, 0, ids.shape[0])
    outputs = run(batch_ids, completion + 1)
    run_context(ids).padding = None
    with ids.tape.scoped(LOSS):
        logits = ops.narrow(outputs.returned[0], 1, completion)
        logits = ops.narrow(logits, 1, completion)
        logits = ops.mul_scalar(logits)
        answer = ops.narrow(batch_ids, 1, completion)
        chosen = selected(logits, answer)
        uncertain = None
        if entropies:
            with ids.tape.no_grad():
                uncertain = entropy(logits.detach())
        return ops.cat([chosen], 0), None if uncertain is None else ops.cat([uncertain], 0)


def _clipped(rollout: Rollout, prompt: Tensor, answer: Tensor, known: Tensor | None) -> Tensor:
    """The clipped loss, with a penalty for leaving the reference where there is one."""
    mask, count = rollout.input_tensor(*answer.shape), rollout.input_tensor(dtype=FP32)
    old = rollout.input_tensor(*answer.shape, dtype=rollout.logits_dtype, name="log-probabilities")
    advantages = rollout.input_tensor(answer.shape[0], dtype=FP32, name="advantages")
    ids, padding = _joined(prompt, answer), _joined(prompt, answer)
    own, _entropies = log_probabilities(rollout.run, ids, padding, answer.shape[1], entropies=True)
    with rollout.tape.scoped(LOSS):
        penalty = None
        if known is not None:
            penalty = ops.add_scalar(ops.sub(ops.exp(ops.sub(known, own)), ops.sub(known, own)))
        advantages = ops.unsqueeze(advantages, 1)
        difference = ops.sub(own, old)
        ratio = ops.exp(difference)
        clipped = ops.clamp(ratio)
        _one, _two = ops.mul(ratio, advantages), ops.mul(clipped, advantages)
        per_token = ops.neg(ops.minimum(_one, _two))
        if penalty is not None:
            per_token = ops.add(per_token, ops.mul_scalar(penalty))
        count = ops.mul_scalar(count)
        return ops.div(ops.sum(ops.reshape(ops.mul(per_token, mask), -1), 0), count)
