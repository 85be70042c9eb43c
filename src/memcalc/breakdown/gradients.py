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
    elif phase in ("clip", "step") or setup.grad_accum > 1:
        yield "gradients of trained weights", sum(parameter_bytes.gradients(p for _, p in step.parameters))
