"""Attention where no fused kernel fits: PyTorch's composite of matrix multiplications and a softmax.

Source: `_scaled_dot_product_attention_math` (aten/src/ATen/native/transformers/attention.cpp) of PyTorch 2.14: half
precision is computed in fp32, grouped heads are repeated, and the scale is split over query and key.
"""

from __future__ import annotations

from memcalc.autograd.tensor import Tensor
from memcalc.ops.elementwise import add, add_, mul_scalar, to
from memcalc.ops.elementwise import dropout as drop_out
from memcalc.ops.matmul import matmul
from memcalc.ops.reduction import softmax
from memcalc.ops.views import expand, reshape, transpose, unsqueeze
from memcalc.tables.dtypes import BOOL, FP32


def math_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, *, is_causal: bool
) -> Tensor:
    """Attention of query [b, h, s, d] over key and value [b, kv, t, d]: [b, h, s, dv], through the scores [b, h, s, t].

    `mask` is additive; without one, `is_causal` becomes a mask [s, t].
    """
    tape, dtype = query.tape, query.dtype
    with tape.autocasting(None):
        wide_query, wide_key, wide_value = to(query, FP32), to(key, FP32), to(value, FP32)
        scaled = mul_scalar(wide_query)
        if mask is None and is_causal and query.shape[-2] > 1:
            mask = _causal(scaled, key.shape[-2])
        repeats = query.shape[1] // key.shape[1]
        repeated_key, repeated_value = _repeat(wide_key, repeats), _repeat(wide_value, repeats)
        scores = matmul(scaled, mul_scalar(transpose(repeated_key, -2, -1)))
        if mask is not None:
            scores = add(scores, mask) if tape.sum_out_of_place else add_(scores, mask)
        probabilities = softmax(scores, FP32)
        if tape.device is not None:
            _masked_rows(probabilities)
        del scores
        probabilities = drop_out(probabilities, dropout)
        returned = to(probabilities, dtype)  # the composite returns the probabilities too
        out = to(matmul(probabilities, repeated_value), dtype)
        del returned
    return out


def _masked_rows(scores: Tensor) -> None:
    """Find rows that are masked throughout, whose probabilities are zero: `_safe_softmax` looks for them."""
    tape = scores.tape
    excluded = tape.empty(scores.shape, BOOL)
    rows = tape.empty((*scores.shape[:-1], 1), BOOL)
    zero = tape.empty((), scores.dtype)
    del excluded, rows, zero


def _causal(like: Tensor, seen: int) -> Tensor:
    tape, length = like.tape, like.shape[-2]
    ones = tape.empty((length, seen), BOOL)
    lower = tape.empty((length, seen), BOOL)
    del ones
    fill = tape.empty((), like.dtype), tape.empty((), like.dtype)
    mask = tape.empty((length, seen), like.dtype)
    del fill, lower
    return mask


def _repeat(x: Tensor, repeats: int) -> Tensor:
    """repeat_interleave over heads, a copy."""
    if repeats == 1:
        return x
    batch, heads, length, dim = x.shape
    return reshape(expand(unsqueeze(x, 2), batch, heads, repeats, length, dim), batch, heads * repeats, length, dim)
