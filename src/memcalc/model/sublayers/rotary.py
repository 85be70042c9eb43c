"""Rotary position embedding."""

from __future__ import annotations

from memcalc.model import ops
from memcalc.model.module import Buffer, Module
from memcalc.model.tensor import Tensor
from memcalc.tables.dtypes import FP32


class RotaryEmbedding(Module):
    """cos and sin [rows, s, dim] in the dtype of the hidden states, from positions [rows, s].

    Two buffers of inverse frequencies belong to it (the second is kept to undo dynamic scaling).
    """

    scope = "rotary embedding"

    def __init__(self, dim: int) -> None:
        self.inv_freq = Buffer(dim // 2)
        self.original_inv_freq = Buffer(dim // 2)

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """The pair for `position_ids`; `x` only lends its dtype."""
        freqs = ops.multiply(ops.to(ops.unsqueeze(position_ids, -1), FP32), self.inv_freq)
        emb = ops.cat((freqs, freqs), -1)
        cos = ops.scale(ops.cos(emb))
        sin = ops.scale(ops.sin(emb))
        return ops.to(cos, x.dtype), ops.to(sin, x.dtype)


def rotate_half(x: Tensor) -> Tensor:
    """The second half of the last dimension negated, then the first."""
    half = x.shape[-1] // 2
    first = ops.narrow(x, -1, half)
    second = ops.narrow(x, -1, x.shape[-1] - half)
    return ops.cat((ops.negative(second), first), -1)


def apply_rotary(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, dim: int = 1) -> tuple[Tensor, Tensor]:
    """Rotate query and key [b, h, s, d]; `dim` is where cos and sin [b, s, d] get their head dimension."""
    cos = ops.unsqueeze(cos, dim)
    sin = ops.unsqueeze(sin, dim)
    query_out = ops.add(ops.multiply(query, cos), ops.multiply(rotate_half(query), sin))
    key_out = ops.add(ops.multiply(key, cos), ops.multiply(rotate_half(key), sin))
    return query_out, key_out
