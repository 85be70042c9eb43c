"""Scratch of PyTorch's reduction kernel (sum, mean): partial results of blocks that share an output.

Where there are few outputs and many inputs for each, several blocks work on one output and leave partial sums in a
buffer in fp32, with a semaphore for each group. Source: aten/src/ATen/native/cuda/Reduce.cuh (`setReduceConfig`) and
aten/src/ATen/TensorIterator.cpp of PyTorch 2.14.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from memcalc.common.sizes import Shape
from memcalc.tables.cuda_devices import CudaDevice

_ACCUMULATED = 4
"""Bytes of a partial result: sums of half precision are in fp32 too."""
_MOST_THREADS = 512
_WARP = 32
_MOST_OUTPUTS_AT_ONCE = 4
_LEAST_PER_THREAD, _MOST_PER_THREAD = 16, 256


class ReduceScratch(NamedTuple):
    """Bytes of the partial results, and of the semaphores."""

    buffer: int
    semaphores: int


def rows_scratch(device: CudaDevice | None) -> Callable[[Shape], Sequence[int]] | None:
    """What a sum of a matrix's rows to one (dim=-2) allocates on `device`, by shape; None where it is unknown."""
    if device is None:
        return None

    def pieces(shape: Shape) -> Sequence[int]:
        found = reduce_scratch(shape, (shape[1], 1), [0], device)
        return [] if found is None else [found.buffer, found.semaphores]

    return pieces


@dataclass
class _Dim:
    size: int
    stride: int
    out: int
    """Stride of the output, 0 where the dimension is summed."""


def reduce_scratch(shape: Shape, stride: Shape, dims: Collection[int], device: CudaDevice) -> ReduceScratch | None:
    """What a sum over `dims` of a tensor allocates while it runs; None where each output has one block.

    `stride` is in elements; negative `dims` are not understood.
    """
    iterated = _coalesced(_ordered(shape, stride, dims))
    reduced = [dim for dim in iterated if dim.out == 0]
    kept = [dim for dim in iterated if dim.out]
    inputs, outputs = _elements(reduced), _elements(kept)
    if not iterated or not inputs or not outputs:
        return None
    on_fastest = not kept or (bool(reduced) and reduced[0].stride < kept[0].stride)
    dim0, dim1 = (inputs, outputs) if on_fastest else (outputs, inputs)
    at_once = 1
    if on_fastest:
        if reduced and reduced[0].stride == 1 and dim0 > 128 and len(iterated) == 1:
            dim0 //= _MOST_OUTPUTS_AT_ONCE
    elif kept[0].stride == 1:
        at_once = _outputs_at_once(kept, reduced)
        dim0 //= at_once
    width, height = _block(dim0, dim1, _MOST_THREADS // at_once)
    step_in, step_out = (width, 1) if on_fastest else (1, width)
    across_warps = -(-inputs // step_in) >= min(height * 16, _MOST_PER_THREAD)
    step_in, step_out = (step_in * height, step_out) if across_warps else (step_in, step_out * height)
    per_thread = -(-inputs // step_in)
    grid = -(-(outputs // at_once) // step_out)
    target = device.sms * (device.threads_per_sm // (width * height))
    if not across_warps or per_thread < _MOST_PER_THREAD or grid > target:
        return None
    blocks = max(min(-(-target // grid), -(-per_thread // _LEAST_PER_THREAD)), -(-per_thread // _MOST_PER_THREAD))
    if blocks <= 1:
        return None
    lanes = 1 if on_fastest else width * at_once
    return ReduceScratch(_ACCUMULATED * outputs * blocks * lanes, 4 * grid)


def _elements(dims: list[_Dim]) -> int:
    count = 1
    for dim in dims:
        count *= dim.size
    return count


def _ordered(shape: Shape, stride: Shape, dims: Collection[int]) -> list[_Dim]:
    """The dimensions as TensorIterator orders them: those that are summed first, each group by growing strides."""
    found, step = [], 1
    for index in reversed(range(len(shape))):
        summed = index in dims
        found.append(_Dim(shape[index], stride[index], 0 if summed or shape[index] == 1 else step))
        step *= 1 if summed else shape[index]
    found = [dim for dim in found if dim.size != 1]
    return sorted(found, key=lambda dim: (dim.out != 0, dim.out, dim.stride, dim.size))


def _coalesced(dims: list[_Dim]) -> list[_Dim]:
    """Neighbours that lie behind one another in input and output are one dimension."""
    merged: list[_Dim] = []
    for dim in dims:
        last = merged[-1] if merged else None
        if last is not None and last.size * last.stride == dim.stride and last.size * last.out == dim.out:
            last.size *= dim.size
        else:
            merged.append(_Dim(dim.size, dim.stride, dim.out))
    return merged


def _outputs_at_once(kept: list[_Dim], reduced: list[_Dim]) -> int:
    """How many neighbouring outputs a thread sums at once: up to four, where sizes and strides are multiples of it."""
    count = _MOST_OUTPUTS_AT_ONCE
    for number in (kept[0].size, *(dim.stride for dim in (*reduced, *kept[1:]))):
        while number % count:
            count //= 2
    return count


def _block(dim0: int, dim1: int, most: int) -> tuple[int, int]:
    """Width and height of a block of threads."""
    dim0, dim1 = _power_below(dim0, most), _power_below(dim1, most)
    width = min(dim0, _WARP)
    height = min(dim1, most // width)
    return min(dim0, most // height), height


def _power_below(number: int, most: int) -> int:
    return most if number >= most else 1 << max(number, 1).bit_length() - 1
