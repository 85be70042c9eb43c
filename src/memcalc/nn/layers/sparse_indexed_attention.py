"""Latent attention to the tokens that an indexer chose (DeepSeek's sparse attention, in GLM 5)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.nn.kv_cache import Cache
from memcalc.nn.layers.attention_backends import attend
from memcalc.nn.layers.latent_attention import LatentAttention, rotate_interleaved
from memcalc.nn.layers.linear import Linear
from memcalc.nn.layers.norms import LayerNorm
from memcalc.nn.module import Module
from memcalc.nn.run_context import run_context
from memcalc.tables.dtypes import BOOL, FP32, INT32, INT64


class Indexer(Module):
    """Scores every token for every query with a few small heads, without gradients, and gives the indices of the best.

    q_rank: width of the query's latent.
    heads, head_dim, rope_dim: sizes of the scoring heads.
    count: tokens that each query attends to (`index_topk`).
    The product with the keys copies them for every query: that is the largest tensor of a layer.
    """

    scope = "attention indexer"

    def __init__(
        self,
        hidden: int,
        q_rank: int,
        heads: int,
        head_dim: int,
        rope_dim: int,
        count: int,
        *,
        rotate: Callable[..., tuple[Tensor, Tensor]] = rotate_interleaved,
    ) -> None:
        self.heads, self.count, self.rotate = heads, count, rotate
        self.dims = [rope_dim, head_dim - rope_dim]
        self.wq_b = Linear(q_rank, heads * head_dim, group="attention")
        self.wk = Linear(hidden, head_dim, group="attention")
        self.k_norm = LayerNorm(head_dim)
        self.weights_proj = Linear(hidden, heads, group="attention")

    def forward(
        self, hidden: Tensor, latent: Tensor, rotation: tuple[Tensor, Tensor], mask: Tensor, cache: Cache | None
    ) -> Tensor:
        """Hidden states [b, s, h], query latent [b, s, rank] and mask [b, s, tokens] to indices [b, s, count]."""
        with hidden.tape.no_grad():
            batch, length, _ = hidden.shape
            q = self.wq_b(latent)
            q = ops.view(q, batch, length, self.heads, -1)
            q_rot, q_pass = ops.split(q, self.dims, -1)
            k = ops.unsqueeze(self.k_norm(self.wk(hidden)), 2)
            k_rot, k_pass = ops.split(k, self.dims, -1)
            q_rot, k_rot = self.rotate(q_rot, k_rot, *rotation, dim=2)
            q = ops.cat((q_rot, q_pass), -1)
            k = ops.squeeze(ops.cat((k_rot, k_pass), -1), 2)
            if cache is not None:
                k = cache.update_index(self, k)
            scores = ops.mul_scalar(
                ops.matmul(ops.to(q, FP32), ops.unsqueeze(ops.to(ops.transpose(k, -1, -2), FP32), 1))
            )
            scores = ops.relu(scores)
            weights = ops.mul_scalar(ops.to(self.weights_proj(hidden), FP32))
            chosen = ops.squeeze(ops.matmul(ops.unsqueeze(weights, -2), scores), -2)
            chosen = ops.masked_fill(chosen, ops.empty_like(mask)) if mask.dtype is BOOL else ops.add(chosen, mask)
            _values, indices = ops.topk(chosen, min(self.count, chosen.shape[-1]))
            del _values
            return ops.empty_like(indices, INT32)


class IndexedLatentAttention(LatentAttention):
    """Latent attention under a mask of what its indexer chose, or, without one, the nearest indexer before it.

    With `alone` the indices are not returned: every layer has an indexer.
    """

    def __init__(
        self, hidden: int, heads: int, *, q_rank: int, indexer: Indexer | None, alone: bool = False, **rest: Any
    ) -> None:
        super().__init__(hidden, heads, q_rank=q_rank, **rest)
        self.indexer = indexer
        self.alone = alone

    def forward(  # type: ignore[override]
        self, hidden: Tensor, rotation: tuple[Tensor, Tensor], mask: Tensor, chosen: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None] | tuple[Tensor, Tensor | None, Tensor]:
        """Hidden states [b, s, h] to [b, s, h], the probabilities where they exist, and indices [b, s, count]."""
        batch, length, _ = hidden.shape
        resid = self.q_a_layernorm(self.q_a_proj(hidden))
        query = self.q_b_proj(resid)
        query_pass, query_rot, latent, key_rot, _compressed = self._compressed(hidden, query, rotation)
        cache = run_context(query).cache
        if cache is not None:
            latent, key_rot = cache.update(self, latent, key_rot)
        query_states = ops.cat((query_pass, query_rot), -1)
        key, value = self._expand(latent, key_rot)
        if self.indexer is not None:
            indices = self.indexer(hidden, resid, rotation, ops.select(mask, 1), cache)
        else:
            assert chosen is not None
            indices = chosen
        left_out = ops.unsqueeze(_not_chosen(indices, key.shape[2]), 1)
        mask = _both(mask, left_out) if mask.dtype is BOOL else ops.masked_fill(mask, left_out)
        out, weights = attend(query_states, key, value, mask, 1, self.dropout)
        out = ops.contiguous(ops.reshape(out, batch, length, -1))
        out = self.o_proj(out)
        return (out, weights) if self.alone else (out, weights, indices)


def _not_chosen(indices: Tensor, tokens: int) -> Tensor:
    """A boolean mask [b, s, tokens] that is false at the indices."""
    ones = indices.tape.empty((*indices.shape[:-1], tokens), BOOL)
    long = ops.empty_like(indices, INT64)
    out = ops.empty_like(ones)
    del long
    return out


def _both(mask: Tensor, left_out: Tensor) -> Tensor:
    chosen = ops.empty_like(left_out)
    out = mask.tape.empty(left_out.shape, BOOL)
    del chosen
    return out
