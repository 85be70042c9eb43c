"""MODEL WEIGHTS: parameters and buffers. The 16-bit copies that autocast makes are on the tape."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from memcalc.nn import parameter_bytes

if TYPE_CHECKING:
    from memcalc.training.traced_step import Step


def model_weights(step: Step, phase: str) -> Iterator[tuple[str, int]]:
    """Parameters by group and dtype, and buffers; the same in every phase."""
    yield from step.extra_weights.items()
    if step.weights is not None:
        yield from step.weights.items()
        return
    if step.engine is not None:
        yield from step.engine.weights()
        return
    yield from parameter_bytes.by_label(tensor for _, tensor in step.tensors).items()
