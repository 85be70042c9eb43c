"""Attention over query, key and value [b, heads, s, d], by the implementation that the setup asks for."""

from __future__ import annotations

from memcalc.model import ops
from memcalc.model.module import Module
from memcalc.model.sublayers.linear import Linear
from memcalc.model.sublayers.norms import RMSNorm
from memcalc.model.sublayers.rotary import apply_rotary
from memcalc.model.tensor import Tensor
from memcalc.tables.dtypes import FP32

Rotation = tuple[Tensor, Tensor]


def repeat_kv(x: Tensor, repeats: int) -> Tensor:
    """[b, kv, s, d] to [b, kv · repeats, s, d], a copy unless there is nothing to repeat."""
    batch, heads, length, dim = x.shape
    if repeats == 1:
        return x
    x = ops.expand(ops.unsqueeze(x, 2), batch, heads, repeats, length, dim)
    return ops.reshape(x, batch, heads * repeats, length, dim)


def eager(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, repeats: int, dropout: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Scores, fp32 softmax and probabilities as tensors: [b, s, h, d] and the probabilities [b, h, s, t]."""
    key = repeat_kv(key, repeats)
    value = repeat_kv(value, repeats)
    weights = ops.scale(ops.matmul(query, ops.transpose(key, 2, 3)))
    if mask is not None:
        weights = ops.add(weights, mask)
    weights = ops.to(ops.softmax(weights, FP32), query.dtype)
    weights = ops.dropout(weights, dropout)
    out = ops.matmul(weights, value)
    return ops.contiguous(ops.transpose(out, 1, 2)), weights


def sdpa(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, repeats: int, dropout: float = 0.0) -> Tensor:
    """Fused attention: grouped heads are native without a mask, repeated with one."""
    if repeats > 1 and not (mask is None and key.shape[-1] == value.shape[-1] <= 256):
        key = repeat_kv(key, repeats)
        value = repeat_kv(value, repeats)
    out = ops.scaled_dot_product_attention(query, key, value, mask, dropout)
    return ops.contiguous(ops.transpose(out, 1, 2))


def attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, repeats: int = 1, dropout: float = 0.0
) -> tuple[Tensor, Tensor | None]:
    """Attention output [b, s, h, d], and the probabilities where the implementation makes them."""
    if query.tape.attention == "eager":
        return eager(query, key, value, mask, repeats, dropout)
    return sdpa(query, key, value, mask, repeats, dropout), None


def attend_same_dtype(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float
) -> tuple[Tensor, Tensor | None]:
    """`attend` as GPT-2 and BERT write it: eager softmax in the scores' own dtype, heads never repeated."""
    if query.tape.attention != "eager":
        return sdpa(query, key, value, mask, 1, dropout), None
    weights = ops.scale(ops.matmul(query, ops.transpose(key, 2, 3)))
    if mask is not None:
        weights = ops.add(weights, mask)
    weights = ops.softmax(weights)
    weights = ops.to(weights, value.dtype)
    weights = ops.dropout(weights, dropout)
    out = ops.matmul(weights, value)
    return ops.transpose(out, 1, 2), weights


class GroupedQueryAttention(Module):
    """Llama's attention: projections to `heads` queries and `kv_heads` keys and values of `head_dim`, rotary, output.

    `bias` is on the query, key and value projections, `out_bias` on the output's; `head_norm` adds a norm over each
    head's query and key (Qwen3); a layer with a sliding `window` caches no more than that.
    """

    scope = "attention"

    def __init__(
        self, hidden: int, heads: int, kv_heads: int, head_dim: int, *,
        bias: bool = False, out_bias: bool = False, head_norm: bool = False, dropout: float = 0.0,
        window: int | None = None,
    ) -> None:  # fmt: skip
        self.head_dim = head_dim
        self.repeats = heads // kv_heads
        self.dropout = dropout
        self.window = window
        self.q_proj = Linear(hidden, heads * head_dim, bias=bias, group="attention")
        self.k_proj = Linear(hidden, kv_heads * head_dim, bias=bias, group="attention")
        self.v_proj = Linear(hidden, kv_heads * head_dim, bias=bias, group="attention")
        self.o_proj = Linear(heads * head_dim, hidden, bias=out_bias, group="attention")
        self.q_norm = RMSNorm(head_dim) if head_norm else None
        self.k_norm = RMSNorm(head_dim) if head_norm else None

    def _heads(self, x: Tensor) -> Tensor:
        return ops.view(x, *x.shape[:-1], -1, self.head_dim)

    def forward(self, hidden: Tensor, rotation: Rotation, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Hidden states [b, s, h] to [b, s, h], and the probabilities where they exist."""
        if self.q_norm is None or self.k_norm is None:
            query = ops.transpose(self._heads(self.q_proj(hidden)), 1, 2)
            key = ops.transpose(self._heads(self.k_proj(hidden)), 1, 2)
        else:
            query = ops.transpose(self.q_norm(self._heads(self.q_proj(hidden))), 1, 2)
            key = ops.transpose(self.k_norm(self._heads(self.k_proj(hidden))), 1, 2)
        value = ops.transpose(self._heads(self.v_proj(hidden)), 1, 2)
        query, key = apply_rotary(query, key, *rotation)
        if query.tape.cache is not None:
            key, value = query.tape.cache.update(self, key, value, self.window)
        out, weights = attend(query, key, value, mask, self.repeats, self.dropout)
        out = ops.contiguous(ops.reshape(out, *hidden.shape[:-1], -1))
        return self.o_proj(out), weights
