"""Kernels of `scaled_dot_product_attention`: which one a GPU takes, and what each allocates for itself.

Sources: {sdp_utils.cpp,attention.cu,attention_backward.cu,flash_attn/flash_api.cpp}
and mem_eff_attention/kernel_backward.h below aten/src/ATen/native/transformers/cuda of PyTorch 2.14.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import NamedTuple

from memcalc.tables.cuda_devices import CudaDevice
from memcalc.tables.dtypes import BF16, FP32, DType

TRACKERS_DEVICE = CudaDevice((9, 0), 132)
"""The GPU that PyTorch's trackers of shape-only tensors play."""


@dataclass(frozen=True)
class Attention:
    """One call: sizes as in query [b, h, s, d], key [b, kv, t, d] and value [b, kv, t, dv]."""

    batch: int
    heads: int
    key_heads: int
    length: int
    key_length: int
    dim: int
    value_dim: int
    dtype: DType
    has_mask: bool
    mask_needs_grad: bool
    dropout: float
    is_causal: bool
    needs_grad: bool


def choose_kernel(call: Attention, device: CudaDevice) -> str:
    """cudnn, flash, efficient or math: the first that takes the call, in the order in which PyTorch asks them."""
    if _cudnn(call, device):
        return "cudnn"
    if _flash(call, device):
        return "flash"
    return "efficient" if _efficient(call, device) else "math"


def _cudnn(call: Attention, device: CudaDevice) -> bool:
    """Preferred on Hopper and on datacenter Blackwell alone; no dropout, no gradient of a mask, no single token."""
    return (
        device.capability in ((9, 0), (10, 0), (10, 3))
        and call.dtype is not FP32
        and not call.mask_needs_grad
        and call.dropout == 0.0
        and call.dim % 8 == 0
        and call.value_dim % 8 == 0
        and (max(call.dim, call.value_dim) <= 128 or (call.dim, call.value_dim) in _CUDNN_WIDE)
        and call.length > 1
    )


_CUDNN_WIDE = ((256, 256), (192, 128))
"""Head dimensions of query and value over 128 that cuDNN takes."""


def _flash(call: Attention, device: CudaDevice) -> bool:
    """From Ampere on, in half precision, without a mask; small shared memory limits large heads in training."""
    if device.capability < (8, 0) or call.dtype is FP32 or call.has_mask:
        return False
    if call.dim != call.value_dim or call.dim > 256:
        return False
    if call.is_causal and call.length != call.key_length:
        return False
    if device.small_shared_memory and call.needs_grad and call.dim > 192:
        return call.dim > 224 and call.dropout == 0.0
    return True


def _efficient(call: Attention, device: CudaDevice) -> bool:
    """Head dimensions of whole 16 bytes; bf16 from Ampere on."""
    if call.dtype is BF16 and device.capability < (8, 0):
        return False
    aligned = 4 if device.capability < (7, 5) and call.dtype is FP32 else 16
    return not any(dim * call.dtype.itemsize % aligned for dim in (call.dim, call.value_dim))


# -- flash ------------------------------------------------------------------------------------------------------------


def flash_splits(call: Attention, device: CudaDevice) -> int:
    """Into how many parts the keys are split where there are too few blocks of queries for all multiprocessors."""
    if call.dropout:
        return 1
    blocks = call.batch * call.heads * -(-call.length // 64)
    width = 256 if call.dim <= 64 else 128 if call.dim <= 128 else 64
    key_blocks = -(-call.key_length // width)
    slots = device.sms * 2
    if blocks >= 0.8 * slots:
        return 1
    efficiencies = [
        _wave_efficiency(blocks * splits / slots) if _eligible(key_blocks, splits) else 0.0
        for splits in range(1, min(128, slots, key_blocks) + 1)
    ]
    best = max(efficiencies, default=0.0)
    good = (number for number, value in enumerate(efficiencies, 1) if value and value >= 0.85 * best)
    return next(good, 1)


def _eligible(key_blocks: int, splits: int) -> bool:
    return splits == 1 or -(-key_blocks // splits) != -(-key_blocks // (splits - 1))


def _wave_efficiency(waves: float) -> float:
    return waves / ceil(waves)


def flash_rounded(call: Attention) -> int:
    """The head dimension as flash's accumulators have it."""
    step = 32 if call.dim <= 128 else 64
    return -(-call.dim // step) * step


# -- memory-efficient -------------------------------------------------------------------------------------------------


def efficient_output_accumulator(call: Attention) -> int:
    """Bytes of an output in fp32 beside the one in half precision, where rows do not fit into registers."""
    if call.dtype is FP32 or max(call.dim, call.value_dim) <= 128:
        return 0
    return call.batch * call.length * call.heads * call.value_dim * 4


class _Tile(NamedTuple):
    """How the backward kernel cuts queries (`rows`) and head dimensions or keys (`columns`) up.

    `accumulates` says that gradients of key and value are summed in a workspace too.
    """

    rows: int
    columns: int
    accumulates: bool = False


def _tile(call: Attention, device: CudaDevice) -> _Tile:
    """The first kernel of the list that has the head dimension and fits into shared memory."""
    dim = max(call.dim, call.value_dim)
    old, small = device.capability < (8, 0), device.small_shared_memory
    if dim <= 64:
        return _Tile(64, 64)
    if call.dtype is FP32:
        return _Tile(64, 64) if old or small else _Tile(128, 64)
    if dim > 128:
        return _Tile(128, 64, accumulates=True)
    if old:
        return _Tile(128, 64)
    if small:
        return _Tile(128, 64) if dim <= 96 else _Tile(64, 64, accumulates=True)
    return _Tile(128, 128)


def efficient_workspace(call: Attention, device: CudaDevice) -> int:
    """Bytes that the backward kernel accumulates in: tiles of the query's gradient with a lock each, and more."""
    tile = _tile(call, device)
    tiles = -(-call.length // tile.rows) * -(-call.dim // tile.columns)
    nbytes = tiles * (16 + tile.rows * tile.columns * 4)
    if tile.accumulates:
        keys = -(-call.key_length // tile.columns) * tile.columns
        nbytes += 4 * keys * sum(-(-dim // tile.rows) * tile.rows for dim in (call.dim, call.value_dim))
    return nbytes * call.batch * call.heads


# -- cuDNN ------------------------------------------------------------------------------------------------------------


def cudnn_workspace(call: Attention) -> int:
    """Bytes of the backward's workspace: the query's gradient and the sum over its products, in fp32."""
    return call.batch * call.heads * call.length * (call.dim + 1) * 4
