"""`scaled_dot_product_attention`: what its kernels keep for backward, and what their backward allocates.

Source: aten/src/ATen/native/transformers/cuda/attention.cu and attention_backward.cu of PyTorch 2.14.
"""

from __future__ import annotations

from dataclasses import replace

from memcalc.autograd.graph import Grads, Node, record
from memcalc.autograd.tensor import Tensor, contiguous_stride, dense_stride
from memcalc.ops.attention_backward import attention_backward
from memcalc.ops.attention_forward import forward_kernel, layouts
from memcalc.ops.attention_kernels import TRACKERS_DEVICE, Attention, choose_kernel
from memcalc.ops.attention_math import math_attention
from memcalc.ops.matmul import cached_cast
from memcalc.ops.ring_attention import ring_attention
from memcalc.ops.views import expand, narrow
from memcalc.tables.dtypes import BOOL


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
    call = _call(query, key, value, mask, dropout if tape.dropout_enabled else 0.0, is_causal)
    kernel = choose_kernel(call, tape.device or TRACKERS_DEVICE)
    if tape.ring is not None and not tape.ring.exchanges_heads:
        return ring_attention(query, key, value, call, kernel)
    if kernel == "flash" and call.dim % 8:
        return _padded_flash(query, key, value, call)
    mask = _additive(mask, query, aligned=kernel == "efficient")
    if kernel == "math":
        return math_attention(query, key, value, mask, call.dropout, is_causal=is_causal)
    bias = None
    if mask is not None and mask.requires_grad:
        bias = mask = expand(mask, call.batch, call.heads, call.length, call.key_length)
    return _fused(query, key, value, mask, bias, call, kernel)


def _call(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, is_causal: bool) -> Attention:
    batch, heads, length, dim = query.shape
    return Attention(
        batch=batch,
        heads=heads,
        key_heads=key.shape[1],
        length=length,
        key_length=key.shape[2],
        dim=dim,
        value_dim=value.shape[-1],
        dtype=query.dtype,
        has_mask=mask is not None,
        mask_needs_grad=mask is not None and mask.requires_grad,
        dropout=dropout,
        is_causal=is_causal,
        needs_grad=_asks_for_gradient(query, key, value),
    )


def _fused(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, bias: Tensor | None, call: Attention, kernel: str
) -> Tensor:
    """Run a fused kernel and note what it keeps."""
    tape = query.tape
    out, lse, random = forward_kernel(query, call, kernel)
    inputs = (query, key, value) if bias is None else (query, key, value, bias)
    node = record(tape, out, attention_backward, inputs, (kernel, call, *layouts(query, key, value)))
    if node is not None:
        for tensor in (query, key, value, *(() if mask is None else (mask,))):
            node.save(tensor)
        for tensor in (out, lse, *random):
            node.save(tensor, output=True)
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


def _padded_flash(query: Tensor, key: Tensor, value: Tensor, call: Attention) -> Tensor:
    """Flash attention pads a head dimension to a multiple of eight, and slices its output back."""
    extra = -call.dim % 8
    query, key, value = pad_last(query, extra), pad_last(key, extra), pad_last(value, extra)
    wide = replace(call, dim=call.dim + extra, value_dim=call.dim + extra)
    out = _fused(query, key, value, None, None, wide, "flash")
    return narrow(out, -1, call.dim)


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
