"""TEMPORARY TENSORS: the scratch of the optimizer step. Those of forward and backward are on the tape."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from memcalc.setup.setup import TrainingSetup
from memcalc.training.trainer_loop import clipping_bytes, runs_trainer, scalar_bytes

if TYPE_CHECKING:
    from memcalc.training.step import Step


def temporary_tensors(step: Step, phase: str) -> Iterator[tuple[str, int]]:
    """The most that the optimizer's step has alive at once, unless it happens in backward."""
    if not isinstance(step.setup, TrainingSetup) or step.steps_in_backward:
        return
    if phase == "step" and step.outlasting:
        yield "outputs that the trainer holds", step.outlasting
    if phase == "step" and step.trained and step.optimizer is not None:
        yield max(_step_scratch(step, step.setup), key=lambda part: part[1])


def _step_scratch(step: Step, setup: TrainingSetup) -> Iterator[tuple[str, int]]:
    """What comes one after another between backward and the next step: only the largest stands in the peak."""
    assert step.optimizer is not None
    yield (
        f"{setup.optimizer} step ({step.implementation})",
        step.optimizer.step[step.implementation](step.update_order),
    )
    yield "norms of gradients (clipping)", clipping_bytes(setup, step.trained)
    if runs_trainer(setup) and step.left_by_backward:
        scalars = scalar_bytes(setup, "backward") - scalar_bytes(setup, "step")
        yield "leaves of the graph, until the loss goes", step.left_by_backward + scalars
