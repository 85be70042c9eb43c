"""Rotary position embedding of neighbouring elements, as the families that pair them apply it."""

from __future__ import annotations

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.nn.layers.rotary import sliced, spread
from memcalc.tables.dtypes import FP32


def rotate_pairs(x: Tensor) -> Tensor:
    """Of every two neighbours in the last dimension the second negated, then the first."""
    first = ops.slice(x, -1, 2)
    second = ops.slice(x, -1, 2)
    return ops.view(ops.stack((ops.neg(second), first), -1), *x.shape)


def _pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return ops.add(ops.mul(x, cos), ops.mul(rotate_pairs(x), sin))


def rotary_pairs_fp32(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Cohere's: fp32 copies of query and key, rotated by pairs and cast back."""
    dtype = query.dtype
    query = ops.to(query, FP32)
    key = ops.to(key, FP32)
    cos = ops.unsqueeze(cos, 1)
    sin = ops.unsqueeze(sin, 1)
    query_out = _pairs(query, cos, sin)
    key_out = _pairs(key, cos, sin)
    return ops.to(query_out, dtype), ops.to(key_out, dtype)


def _spread_half(table: Tensor) -> Tensor:
    """cos or sin of halves as that of pairs: a copy that every layer makes and keeps."""
    return spread(ops.narrow(table, -1, table.shape[-1] // 2))


def rotary_pairs(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Helium's: pairs, from a table that was laid out for halves."""
    cos = ops.unsqueeze(cos, 1)
    sin = ops.unsqueeze(sin, 1)
    cos = _spread_half(cos)
    sin = _spread_half(sin)
    query_out = _pairs(query, cos, sin)
    key_out = _pairs(key, cos, sin)
    return query_out, key_out


def rotary_pairs_of_part(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """GLM's: pairs among the first elements of each head, from a table that was laid out for halves."""
    cos = ops.unsqueeze(cos, 1)
    sin = ops.unsqueeze(sin, 1)
    cos = _spread_half(cos)
    sin = _spread_half(sin)
    width = cos.shape[-1]
    query_rot, query_pass = sliced(query, width)
    key_rot, key_pass = sliced(key, width)
    query_out = _pairs(query_rot, cos, sin)
    key_out = _pairs(key_rot, cos, sin)
    query_out = ops.cat([query_out, query_pass], -1)
    key_out = ops.cat([key_out, key_pass], -1)
    return query_out, key_out


def rotary_given_pairs_of_part(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """GLM-4V's: pairs among the first elements of each head, from a table that was laid out for pairs."""
    cos = ops.unsqueeze(cos, 1)
    sin = ops.unsqueeze(sin, 1)
    width = cos.shape[-1]
    query_rot, query_pass = sliced(query, width)
    key_rot, key_pass = sliced(key, width)
    query_out = _pairs(query_rot, cos, sin)
    key_out = _pairs(key_rot, cos, sin)
    query_out = ops.cat([query_out, query_pass], -1)
    key_out = ops.cat([key_out, key_pass], -1)
    return query_out, key_out


def rotary_pairs_upcast(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """ERNIE's: pairs in fp32, where each factor is cast by itself."""
    dtype = query.dtype
    cos = ops.unsqueeze(cos, 1)
    sin = ops.unsqueeze(sin, 1)
    cos = _spread_half(cos)
    sin = _spread_half(sin)
    query_out = _upcast_pairs(query, cos, sin)
    key_out = _upcast_pairs(key, cos, sin)
    return ops.to(query_out, dtype), ops.to(key_out, dtype)


def _upcast_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    kept = ops.mul(ops.to(x, FP32), cos)
    return ops.add(kept, ops.mul(ops.to(rotate_pairs(x), FP32), sin))
