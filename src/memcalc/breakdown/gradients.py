"""GRADIENTS: of the weights that are trained. In backward they appear one by one, on the tape."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from memcalc.nn import parameter_bytes
from memcalc.setup.setup import TrainingSetup

if TYPE_CHECKING:
    from memcalc.training.traced_step import Step


def gradients(step: Step, phase: str) -> Iterator[tuple[str, int]]:
    """All of them in the optimizer step; with accumulation they stand through forward and backward too.

    An optimizer that steps in backward leaves none.
    """
    setup = step.setup
    if not isinstance(setup, TrainingSetup) or step.steps_in_backward:
        return
    if step.engine is not None:
        yield from step.engine.gradients(phase, step.optimizer_scratch[1])
        return
    kept = [p for _, p in step.parameters if p.keeps_gradient]
    if kept:
        yield "gradients that no optimizer zeroes", sum(parameter_bytes.gradients(kept))
    if phase in ("clip", "step") or setup.grad_accum > 1:
        others = (p for _, p in step.parameters if not p.keeps_gradient)
        yield "gradients of trained weights", sum(parameter_bytes.gradients(others))
