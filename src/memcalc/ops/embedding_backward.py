"""The gradient of an embedding on a GPU: of many ids, PyTorch sorts them and sums rows of the same id in parts.

Source: aten/src/ATen/native/cuda/{Embedding,EmbeddingBackwardKernel}.cu of PyTorch 2.14 with CUB of CUDA 13; the sizes
of CUB's temporaries were read off PyTorch's allocator for compute capabilities 7.5 to 10.0.
"""

from __future__ import annotations

from memcalc.autograd.tape import Tape
from memcalc.autograd.tensor import Tensor, is_contiguous
from memcalc.common.sizes import Shape
from memcalc.tables.cuda_devices import CudaDevice
from memcalc.tables.dtypes import FP32, INT64, UINT8

SORTED_ABOVE = 3072
"""Up to so many ids a kernel adds rows one after another, without scratch."""
_ROWS_PER_PART = 10
_MOST_THREADS = 1024


def sorted_embedding_gradient(tape: Tape, device: CudaDevice, ids: int, grad: Tensor, shape: Shape) -> Tensor:
    """The gradient of a table of `shape` [rows, width] from that of `ids` looked-up rows."""
    rows, width = shape
    copied = None if is_contiguous(grad.shape, grad.stride) else tape.empty(grad.shape, grad.dtype)
    order = [tape.empty((ids,), INT64), tape.empty((ids,), INT64)]
    positions = tape.empty((ids,), INT64)
    scratch = _temporary(tape, _radix_sort_bytes(device, ids, rows))
    del positions, scratch
    out = tape.empty(shape, grad.dtype)
    order += [tape.empty((ids,), INT64), tape.empty((), INT64)]
    keys = tape.empty((ids,), INT64)
    scratch = _temporary(tape, _scan_bytes(ids, _unique_tile(device)))
    del keys, scratch
    segments = min(ids, rows)
    parts = ids // _ROWS_PER_PART + segments
    order += [tape.empty((segments,), INT64), tape.empty((segments,), INT64)]
    scratch = _temporary(tape, _scan_bytes(segments, _SCAN_TILE))
    del scratch
    order += [tape.empty((), INT64), tape.empty((parts,), INT64)]
    blocks = -(-width // _MOST_THREADS)
    if segments * blocks < 4 * device.sms and parts >= 4 * blocks * segments:  # few rows that many ids share
        order.append(tape.empty((parts,), INT64))
        if grad.dtype is not FP32:
            order.append(tape.empty((segments, width), FP32))
    else:
        order.append(tape.empty((parts, width), FP32))
    del order, copied
    return out


def _temporary(tape: Tape, nbytes: int) -> Tensor:
    return tape.empty((nbytes,), UINT8)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // 256) * 256


def _radix_sort_bytes(device: CudaDevice, count: int, rows: int) -> int:
    """Pairs of 64-bit integers, sorted by eight bits in each pass: histograms, what tiles tell one another, a copy."""
    passes = -(-rows.bit_length() // 8)
    tile = 4608 if device.capability >= (9, 0) else 3840 if device.capability >= (8, 0) else 2816
    second = 2 * _aligned(8 * count) if passes > 1 else 0
    return 2048 * passes + 1024 * -(-count // tile) + second + 511


_SCAN_TILE = 896
"""Integers that a block of CUB's scan takes."""


def _unique_tile(device: CudaDevice) -> int:
    """Keys that a block of CUB's unique takes."""
    return 4864 if device.capability >= (9, 0) else 1344 if device.capability >= (8, 0) else 320


def _scan_bytes(count: int, tile: int) -> int:
    """What the tiles of a scan tell one another."""
    return _aligned(16 * (-(-count // tile) + 32)) + 511
