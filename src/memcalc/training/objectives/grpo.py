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
from memcalc.training.objectives.rollout import LOSS, Actors


def grpo(actors: Actors) -> Tensor:
    """The loss of completions, whose advantages are given. Logits are computed for the completions alone."""
    rows, completion = actors.sequences, actors.completion
    prompt, answer = actors.given(rows, actors.length - completion), actors.given(rows, completion)
    known = _scored(actors, prompt, answer)
    return _clipped(actors, prompt, answer, known)


def _scored(actors: Actors, prompt: Tensor, answer: Tensor) -> Tensor | None:
    """Log-probabilities [b, c] of the reference, computed before the step or long before."""
    if actors.setup.reference_used == "precomputed":
        return actors.given(*answer.shape, dtype=actors.logits_dtype, name="log-probabilities")
    if actors.companion is None:
        return None
    ids, padding = _joined(prompt, answer), _joined(prompt, answer)
    with actors.tape.no_grad():
        return log_probabilities(actors.ask, ids, padding, answer.shape[1], entropies=False)[0]


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


def _clipped(actors: Actors, prompt: Tensor, answer: Tensor, known: Tensor | None) -> Tensor:
    """The clipped loss, with a penalty for leaving the reference where there is one."""
    mask, count = actors.given(*answer.shape), actors.given(dtype=FP32)
    old = actors.given(*answer.shape, dtype=actors.logits_dtype, name="log-probabilities")
    advantages = actors.given(answer.shape[0], dtype=FP32, name="advantages")
    ids, padding = _joined(prompt, answer), _joined(prompt, answer)
    own, _entropies = log_probabilities(actors.run, ids, padding, answer.shape[1], entropies=True)
    with actors.tape.scoped(LOSS):
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
