"""MODEL WEIGHTS: parameters and buffers. The 16-bit copies that autocast makes are on the tape."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from memcalc.common.sizes import rounded
from memcalc.nn.module import CONSTANTS, Buffer
from memcalc.tables.dtypes import short

if TYPE_CHECKING:
    from memcalc.training.step import Step


def model_weights(step: Step, phase: str) -> Iterator[tuple[str, int]]:
    """Parameters by group and dtype, and buffers; the same in every phase."""
    yield from step.beside.items()
    if step.weights is not None:
        yield from step.weights.items()
        return
    sizes: dict[str, int] = {}
    for _, tensor in step.tensors:
        if isinstance(tensor, Buffer):
            name = CONSTANTS if tensor.group == CONSTANTS else "buffers"
        else:
            name = f"{short(tensor.dtype)} {tensor.group}"
        sizes[name] = sizes.get(name, 0) + rounded(tensor.numel * tensor.dtype.itemsize) * tensor.copies
    yield from sizes.items()
