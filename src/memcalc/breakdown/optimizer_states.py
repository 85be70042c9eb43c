"""OPTIMIZER STATES: what the optimizer keeps from one step to the next. They exist from the first step on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from memcalc.common.sizes import ALIGNMENT
from memcalc.setup.setup import TrainingSetup

if TYPE_CHECKING:
    from memcalc.training.traced_step import Step


def optimizer_states(step: Step, phase: str) -> Iterator[tuple[str, int]]:
    """Bytes by kind of state, and the step counters where the implementation keeps them on the GPU."""
    if step.optimizer is None:
        return
    sizes: dict[str, int] = {}
    for weight in step.trained:
        for name, nbytes in step.optimizer.states(weight).items():
            sizes[name] = sizes.get(name, 0) + nbytes * weight.copies
    yield from sizes.items()
    if step.engine is not None:
        yield from step.engine.states()
    if step.trained and step.optimizer.once:
        yield "tables", step.optimizer.once
    if isinstance(step.setup, TrainingSetup) and step.implementation in step.optimizer.counter_on_device:
        yield "step counters", ALIGNMENT * sum(weight.copies for weight in step.trained)
