"""Multiplication with quantized weights: what is dequantized when, and what is kept.

The weights themselves never need a gradient, so that nothing of the input is kept, but where a library keeps it.
Sources: bitsandbytes 0.50 (autograd/_functions.py, backends/cuda/ops.py), transformers 5.24
(integrations/finegrained_fp8.py), gptqmodel 7.7 (nn_modules/qlinear/{torch,gemm_awq}.py). What a kernel's wrapper
allocates inside one operation is memory on a GPU, but hidden from PyTorch's trackers.
"""

from __future__ import annotations

from math import prod

from memcalc.autograd.graph import Grads, Node, record
from memcalc.autograd.tape import ACTIVATIONS, TEMPORARY, Tape
from memcalc.autograd.tensor import Storage, Tensor
from memcalc.common.sizes import Shape
from memcalc.ops.elementwise import to
from memcalc.ops.matmul import matmul
from memcalc.ops.views import contiguous, reshape, view
from memcalc.tables.dtypes import FP16, FP32, INT8, INT32, INT64, DType

FUSED_ROWS_4BIT = 7
"""Up to so many rows bitsandbytes multiplies without dequantizing (more on some GPUs, up to 1536)."""

FUSED_ROWS_AWQ = 1024
"""Up to so many rows AWQ's kernel multiplies without dequantizing."""

_BLOCK = 64
_GROUP = 128
_SCOPE = "dequantized weights"


def _scratch(tape: Tape, nbytes: int) -> Storage | None:
    """Memory that is allocated inside an operation: a tracker does not see it."""
    return None if tape.sum_out_of_place else tape.allocate(nbytes, TEMPORARY, _SCOPE)


def _dense(tape: Tape, shape: Shape, dtype: DType) -> Tensor:
    out = tape.empty(shape, dtype)
    out.storage.allocation.name = _SCOPE
    return out


def _rows(x: Tensor) -> int:
    return prod(x.shape[:-1])


# -- bitsandbytes, 4 bits ---------------------------------------------------------------------------------------------


def dequantize_4bit(tape: Tape, shape: Shape, dtype: DType, *, nested: bool) -> Tensor:
    """The weight [out, in] in `dtype`; scales that are quantized themselves are unpacked first."""
    scales = tape.empty((-(-prod(shape) // _BLOCK),), FP32) if nested else None
    out = _dense(tape, shape, dtype)
    del scales
    return out


def linear_4bit(x: Tensor, shape: Shape, stored: DType, *, nested: bool) -> Tensor:
    """x [..., in] times a weight [out, in] that was quantized from dtype `stored`. Keeps nothing."""
    tape, blocks = x.tape, 4 * -(-prod(shape) // _BLOCK)
    scratch: list[Storage | None] = []
    if _rows(x) > FUSED_ROWS_4BIT:
        if nested:
            scratch = [_scratch(tape, blocks), _scratch(tape, blocks)]
        scratch.append(_scratch(tape, prod(shape) * x.dtype.itemsize))
    out = tape.empty((*x.shape[:-1], shape[0]), x.dtype)
    scratch.clear()
    record(tape, out, _linear_4bit_backward, (x,), (shape, stored, nested))
    return out


def _linear_4bit_backward(node: Node, grads: Grads) -> list[Tensor | None]:
    (grad,) = grads
    if grad is None:
        return [None]
    shape, stored, nested = node.context
    weight = to(dequantize_4bit(node.tape, shape, stored, nested=nested), grad.dtype)
    out = matmul(grad, weight)
    return [out]


# -- bitsandbytes, 8 bits ---------------------------------------------------------------------------------------------


def linear_8bit(x: Tensor, shape: Shape) -> Tensor:
    """x [..., in] times an int8 weight [out, in] (LLM.int8, without outliers). Keeps x until the graph is gone.

    The library holds x as an attribute and not as a saved tensor, so checkpointing without reentry does not free it.
    """
    tape, (outputs, _) = x.tape, shape
    flat = reshape(x.detach(), -1, x.shape[-1])
    half = to(flat, FP16)
    statistics = tape.empty((flat.shape[0],), FP32)
    rounded = tape.empty(flat.shape, INT8)
    inside = [_scratch(tape, 2 * flat.numel), _scratch(tape, flat.numel)]  # magnitudes, and which of them are outliers
    inside.clear()
    del half
    sums = _scratch(tape, flat.shape[0] * outputs * INT32.itemsize)
    first = _scratch(tape, flat.shape[0] * outputs * FP16.itemsize) if x.dtype is not FP16 else None
    out = tape.empty((flat.shape[0], outputs), x.dtype)
    del sums, first
    outliers = tape.empty((0, 0), x.dtype)
    del statistics, rounded, outliers
    node = record(tape, out, _linear_8bit_backward, (x,), (shape, x.dtype, x.shape))
    if node is not None:
        storage = flat.storage
        if storage.allocation.row == TEMPORARY:
            storage.allocation.row, storage.allocation.name = ACTIVATIONS, "inputs kept by LLM.int8"
        tape.kept_by_graph.append(storage)
    return view(out, *x.shape[:-1], outputs)


def dequantize_8bit(tape: Tape, shape: Shape, dtype: DType) -> Tensor:
    """The weight [out, in] in `dtype`."""
    weight = _dense(tape, shape, dtype)
    scales = tape.empty((shape[0], 1), FP32)
    del scales
    return weight


def _linear_8bit_backward(node: Node, grads: Grads) -> list[Tensor | None]:
    (grad,) = grads
    if grad is None:
        return [None]
    shape, dtype, full = node.context
    grad = contiguous(grad)
    weight = dequantize_8bit(node.tape, shape, dtype)
    grad = to(grad, dtype)
    return [view(matmul(grad, weight), *full)]


# -- GPTQ -------------------------------------------------------------------------------------------------------------


def dequantize_gptq(tape: Tape, shape: Shape) -> Tensor:
    """The weight [in, out] in fp16, unpacked in plain PyTorch: integers, then scales and zeros of every element."""
    inputs, outputs = shape
    groups = -(-inputs // _GROUP)
    zeros = tape.empty((groups, outputs), INT8)
    shifted = tape.empty(shape, INT32)
    narrow = tape.empty(shape, INT8)
    del shifted
    codes = tape.empty(shape, INT8)
    del narrow
    order = tape.empty((inputs,), INT64)
    scales = tape.empty(shape, FP16)
    del order
    order = tape.empty((inputs,), INT64)
    of_each = tape.empty(shape, INT8)
    del order
    difference = tape.empty(shape, INT8)
    del of_each
    weight = _dense(tape, shape, FP16)
    del zeros, codes, scales, difference
    return weight


def linear_gptq(x: Tensor, shape: Shape) -> Tensor:
    """x [..., in] times a weight [in, out]. Autograd keeps the dequantized weight where x needs a gradient."""
    flat = reshape(x, -1, x.shape[-1])
    weight = to(dequantize_gptq(x.tape, shape), x.dtype)
    out = matmul(flat, weight)
    del weight
    return reshape(out, *x.shape[:-1], shape[1])


# -- AWQ --------------------------------------------------------------------------------------------------------------


def linear_awq(x: Tensor, shape: Shape) -> Tensor:
    """x [..., in] times a weight [in, out]. Keeps nothing; many rows are multiplied with the dequantized weight."""
    tape = x.tape
    weight = None
    if _rows(x) > FUSED_ROWS_AWQ:
        weight = _dense(tape, shape, FP16)
        weight = to(weight, x.dtype)
    out = tape.empty((*x.shape[:-1], shape[1]), x.dtype)
    del weight
    record(tape, out, _transposed_backward, (x,), shape)
    return out


def _transposed_backward(node: Node, grads: Grads) -> list[Tensor | None]:
    (grad,) = grads
    if grad is None:
        return [None]
    weight = to(_dense(node.tape, node.context, FP16), grad.dtype)
    out = node.tape.empty((*grad.shape[:-1], node.context[0]), grad.dtype)
    del weight
    return [out]


# -- fp8 --------------------------------------------------------------------------------------------------------------


def linear_fp8(x: Tensor, shape: Shape) -> Tensor:
    """x [..., in] times an fp8 weight [out, in] in blocks, in one kernel. Keeps nothing."""
    out = x.tape.empty((*x.shape[:-1], shape[0]), x.dtype)
    record(x.tape, out, _linear_fp8_backward, (x,), shape)
    return out


def _linear_fp8_backward(node: Node, grads: Grads) -> list[Tensor | None]:
    (grad,) = grads
    if grad is None:
        return [None]
    outputs, inputs = node.context
    blocks = -(-inputs // _GROUP)
    scale = node.tape.empty((-(-outputs // _GROUP), blocks), grad.dtype)
    weight = _dense(node.tape, node.context, grad.dtype)
    wide = node.tape.empty((outputs, blocks), grad.dtype)
    del scale
    out = matmul(grad, weight)
    del wide
    return [out]


# -- anything else ----------------------------------------------------------------------------------------------------


# -- GGUF's types in diffusers ----------------------------------------------------------------------------------------

GGUF_SCRATCH: dict[str, tuple[int, DType]] = {
    "Q8_0": (512, FP16),
    "Q6_K": (1312, FP16),
    "Q5_K": (1840, FP16),
    "Q4_K": (1328, FP16),
    "Q3_K": (1360, FP16),
    "Q2_K": (1344, FP16),
    "Q5_1": (2560, FP16),
    "Q5_0": (2560, FP16),
    "Q4_1": (1280, FP16),
    "Q4_0": (768, FP16),
    "BF16": (2048, FP32),
    "IQ4_NL": (3072, FP32),
    "IQ4_XS": (3128, FP32),
}
"""What unpacking takes by type: most bytes for 256 weights, those of the result among them, and the result's dtype.

Source: dequantize_blocks_* of diffusers 0.42.1 (quantizers/gguf/utils.py), run on PyTorch's allocator.
"""


def linear_gguf(x: Tensor, shape: Shape, kind: str) -> Tensor:
    """x [..., in] times a weight [out, in] of a GGUF type, without gradients: unpacked in tensor operations, then cast.

    Types that GGUF_SCRATCH does not have are those that diffusers does not load.
    """
    tape, count = x.tape, prod(shape)
    most, dtype = GGUF_SCRATCH[kind]
    scratch = _scratch(tape, count * most // 256 - count * dtype.itemsize)
    unpacked = _dense(tape, shape, dtype)
    del scratch
    weight = to(unpacked, x.dtype)
    del unpacked
    out = tape.empty((*x.shape[:-1], shape[0]), x.dtype)
    del weight
    return out


def linear_dequantized(x: Tensor, shape: Shape) -> Tensor:
    """x [..., in] times a weight [out, in] that is dequantized in forward, and again in backward. Keeps nothing."""
    weight = _dense(x.tape, shape, x.dtype)
    out = x.tape.empty((*x.shape[:-1], shape[0]), x.dtype)
    del weight
    record(x.tape, out, _dequantized_backward, (x,), shape)
    return out


def _dequantized_backward(node: Node, grads: Grads) -> list[Tensor | None]:
    (grad,) = grads
    if grad is None:
        return [None]
    weight = _dense(node.tape, node.context, grad.dtype)
    return [matmul(grad, weight)]


# -- experts ----------------------------------------------------------------------------------------------------------

_AT_ONCE = 2**30
"""Bytes of experts that Transformers dequantizes at once in the backward pass of fp8 experts."""


def grouped(rows: Tensor, shape: Shape, offsets: Tensor, *, fused: bool, apart: bool = False) -> Tensor:
    """Rows [n, in] times their experts' weights [experts, out, in]. Keeps nothing but the offsets.

    Without a `fused` kernel all experts are dequantized, in forward and again in backward; `apart` one after another.
    """
    tape = rows.tape
    weight = None if fused else _dense(tape, (1, *shape[1:]) if apart else shape, rows.dtype)
    out = tape.empty((rows.shape[0], shape[1]), rows.dtype)
    del weight
    node = record(tape, out, _grouped_backward, (rows,), (shape, fused, apart))
    if node is not None:
        node.save(offsets)
    return out


def _grouped_backward(node: Node, grads: Grads) -> list[Tensor | None]:
    (grad,) = grads
    if grad is None:
        return [None]
    (count, outputs, inputs), fused, apart = node.context
    at_once = (
        min(count, max(1, _AT_ONCE // (outputs * inputs * grad.dtype.itemsize))) if fused else 1 if apart else count
    )
    out = node.tape.empty((grad.shape[0], inputs), grad.dtype) if at_once < count else None
    weight = _dense(node.tape, (at_once, outputs, inputs), grad.dtype)
    made = node.tape.empty((grad.shape[0] * at_once // count, inputs), grad.dtype)
    del weight
    return [made if out is None else out]
