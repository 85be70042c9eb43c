"""TEMPORARY TENSORS: the scratch of the optimizer step. Those of forward and backward are on the tape."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from memcalc.setup.setup import TrainingSetup

if TYPE_CHECKING:
    from memcalc.training.traced_step import Step


LOAD = "load"
"""The phase in which weights are loaded."""


def temporary_tensors(step: Step, phase: str) -> Iterator[tuple[str, int]]:
    """The most that the optimizer's step has alive at once, unless it happens in backward."""
    if phase == LOAD and step.loading_bytes:
        yield "weights while they are loaded", step.loading_bytes
    if not isinstance(step.setup, TrainingSetup) or step.steps_in_backward:
        return
    if phase == "step" and step.held_until_step_bytes:
        yield "hidden states kept by the trainer", step.held_until_step_bytes
    if step.engine is not None:
        yield from step.engine.temporaries(phase, step.optimizer_scratch)
    elif phase == "step":
        yield step.optimizer_scratch
