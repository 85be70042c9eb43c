"""Fused attention: which kernel `scaled_dot_product_attention` takes, and what that kernel keeps.

Source: aten/src/ATen/native/transformers/cuda/{sdp_utils.cpp,attention.cu} of PyTorch 2.14, as on a card of compute
capability 9.0 (an Ampere card prefers flash to cuDNN; the rounded bytes are the same).
"""

from __future__ import annotations

from memcalc.autograd.graph import Grads, Node, record
from memcalc.autograd.tape import Tape
from memcalc.autograd.tensor import Tensor, contiguous_stride, dense_stride
from memcalc.common.sizes import Shape
from memcalc.ops.attention_math import math_attention
from memcalc.ops.matmul import cached_cast
from memcalc.ops.views import expand, narrow
from memcalc.tables.dtypes import BOOL, FP32, INT64, DType


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    dropout: float = 0.0,
    *,
    is_causal: bool = False,
) -> Tensor:
    """Attention of query [b, h, s, d] over key [b, kv, t, d] and value [b, kv, t, dv]: [b, h, s, dv].

    Keeps query, key, value, output, mask, the log-sum-exp in fp32, and two scalars of the random state. A mask that
    needs a gradient (a position bias) gets one of the full size [b, h, s, t].
    """
    tape = query.tape
    if tape.autocast is not None:
        mask = None if mask is None else cached_cast(mask)
        value, key, query = cached_cast(value), cached_cast(key), cached_cast(query)
    batch, heads, length, dim = query.shape
    kernel = _kernel(query, value, mask, dropout if tape.dropout_enabled else 0.0)
    shape = (batch, heads, length, value.shape[-1])
    if kernel == "flash" and dim % 8:
        return _padded_flash(query, key, value, dropout)
    mask = _additive(mask, query, aligned=kernel == "efficient")
    if kernel == "math":
        return math_attention(query, key, value, mask, dropout if tape.dropout_enabled else 0.0, is_causal=is_causal)
    bias = None
    if mask is not None and mask.requires_grad:
        bias = mask = expand(mask, batch, heads, length, key.shape[-2])
    stride = _heads_inside(shape) if kernel == "efficient" else _matching(shape, query)
    out = tape.empty(shape, query.dtype, stride)
    if kernel == "efficient":
        length = -(-length // 32) * 32 if _asks_for_gradient(query, key, value) else 0
    lse = tape.empty((batch, heads, length, 1), FP32)
    seed, offset = _random_state(tape_of=query, kernel=kernel)
    inputs = (query, key, value) if bias is None else (query, key, value, bias)
    node = record(tape, out, _attention_backward, inputs, (kernel, *_layouts(query, key, value)))
    if node is not None:
        for tensor in (query, key, value, *(() if mask is None else (mask,)), out, lse, seed, offset):
            node.save(tensor)
    return out


def _additive(mask: Tensor | None, query: Tensor, *, aligned: bool) -> Tensor | None:
    """The float mask that kernels take, in the dtype of `query`.

    A boolean one is converted in every call. The memory-efficient kernel wants rows of a multiple of eight, and
    copies a mask with odd ones.
    """
    if mask is None:
        return None
    tape = query.tape
    if mask.dtype is BOOL:
        fill = tape.empty((), query.dtype), tape.empty((), query.dtype)
        mask = tape.empty((query.shape[0], *mask.shape[1:]), query.dtype)
        del fill
    length = mask.shape[-1]
    if aligned and length % 8:
        mask = narrow(pad_last(mask, -length % 8), -1, length)
    return mask


def _asks_for_gradient(*tensors: Tensor) -> bool:
    return tensors[0].tape.grad_enabled and any(tensor.requires_grad for tensor in tensors)


def _kernel(query: Tensor, value: Tensor, mask: Tensor | None, dropout: float) -> str:
    """cudnn, flash, efficient or math. Only the memory-efficient kernel gives a gradient for a mask.

    Its head dimensions have to be multiples of 16 bytes; where they are not, PyTorch falls back to plain operations.
    """
    dim, length = query.shape[-1], query.shape[-2]
    fallback = "math" if any(d * query.dtype.itemsize % 16 for d in (dim, value.shape[-1])) else "efficient"
    if query.dtype is FP32 or dim > 256 or (mask is not None and mask.requires_grad):
        return fallback
    if dropout == 0.0 and dim % 8 == 0 and value.shape[-1] % 8 == 0 and length > 1:
        return "cudnn"
    if mask is None and value.shape[-1] == dim:
        return "flash"
    return fallback


def _random_state(*, tape_of: Tensor, kernel: str) -> tuple[Tensor, Tensor]:
    """Seed and offset: flash keeps them as [2] and a scalar, the others as two scalars."""
    tape = tape_of.tape
    return tape.empty((2,) if kernel == "flash" else (), INT64), tape.empty((), INT64)


def _heads_inside(shape: Shape) -> Shape:
    """Strides of [b, h, s, d] stored as (b, s, h, d)."""
    _, heads, length, dim = shape
    return (length * heads * dim, dim, heads * dim, 1)


def _matching(shape: Shape, query: Tensor) -> Shape:
    """Strides of the output that cuDNN and flash lay out as the query is laid out."""
    return dense_stride(shape, query.stride) if shape == query.shape else _reordered(shape, query)


def _reordered(shape: Shape, query: Tensor) -> Shape:
    order = sorted(range(4), key=lambda dim: (query.stride[dim], -dim))
    out, step = [0] * 4, 1
    for dim in order:
        out[dim] = step
        step *= shape[dim]
    return tuple(out)


def _layouts(*tensors: Tensor) -> tuple[tuple[Shape, Shape], ...]:
    return tuple((tensor.shape, tensor.stride) for tensor in tensors)


def _attention_backward(node: Node, grads: Grads) -> list[Tensor | None]:
    (grad,) = grads
    if grad is None:
        return [None] * len(node.edges)
    kernel, *layouts = node.context
    out: list[Tensor | None] = [
        node.tape.empty(
            shape, grad.dtype, _heads_inside(shape) if kernel == "efficient" else dense_stride(shape, stride)
        )
        for shape, stride in layouts
    ]
    out.extend(_bias_gradient(node.tape, edge[2], grad.dtype) for edge in node.edges[3:] if edge is not None)
    return out


def _bias_gradient(tape: Tape, shape: Shape, dtype: DType) -> Tensor:
    """The gradient of a bias, whose rows the memory-efficient kernel writes at a multiple of sixteen."""
    wide = tape.empty((*shape[:-1], -(-shape[-1] // 16) * 16), dtype)
    return Tensor(shape, wide.stride, dtype, wide.storage)


def _padded_flash(query: Tensor, key: Tensor, value: Tensor, dropout: float) -> Tensor:
    """Flash attention pads a head dimension to a multiple of eight, and slices its output back."""
    dim = query.shape[-1]
    padded = [pad_last(tensor, -dim % 8) for tensor in (query, key, value)]
    out = scaled_dot_product_attention(padded[0], padded[1], padded[2], None, dropout or 1e-9)
    return narrow(out, -1, dim)


def pad_last(x: Tensor, extra: int) -> Tensor:
    """x with `extra` zeros after its last dimension, a copy."""
    shape = (*x.shape[:-1], x.shape[-1] + extra)
    out = x.tape.empty(shape, x.dtype, contiguous_stride(shape))
    record(x.tape, out, _pad_backward, (x,), x.shape)
    return out


def _pad_backward(node: Node, grads: Grads) -> list[Tensor | None]:
    (grad,) = grads
    return [
        None if grad is None else node.tape.empty(node.context, grad.dtype, dense_stride(node.context, grad.stride))
    ]
