"""OTHER OVERHEAD: the inputs of the step, and the caches of engines that allocate them at the start.

What lies outside PyTorch's tensors is added by the report.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from memcalc.setup.setup import TrainingSetup
from memcalc.training.trainer_loop import scalar_bytes

if TYPE_CHECKING:
    from memcalc.training.traced_step import Step


def other_overhead(step: Step, phase: str) -> Iterator[tuple[str, int]]:
    """Inputs that PyTorch's trackers see, because a view of them was made; caches that stand before the first token."""
    for allocation in step.tape.inputs:
        if allocation.aliased:
            yield allocation.name, allocation.nbytes
    yield from step.preallocated_cache.items()
    if isinstance(step.setup, TrainingSetup) and (scalars := scalar_bytes(step.setup, phase)):
        yield "scalars of the trainer", scalars
    if step.engine is not None:
        yield from step.engine.buffers(phase)
