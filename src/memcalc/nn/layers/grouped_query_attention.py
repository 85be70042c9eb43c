"""Grouped-query attention, as Llama and most decoders have it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.nn.layers.attention_backends import attend
from memcalc.nn.layers.linear import Linear
from memcalc.nn.layers.norms import RMSNorm
from memcalc.nn.layers.rotary import Rotate, Rotation, apply_rotary
from memcalc.nn.module import Module, Parameter
from memcalc.nn.run_context import run_context


class QKNorm(NamedTuple):
    """A norm of queries and keys: `make(heads, head_dim)` makes one, `names` are its attribute names.

    at: "projection": on the whole projection [b, s, heads * d]; "heads": on [b, s, heads, d] right after each
    projection; "after_projections": on the same once all three are projected; "after_transpose": on [b, heads, s, d];
    "after_rotary": on the same after the rotary embedding.
    """

    make: Callable[[int, int], Module]
    at: Literal["projection", "heads", "after_projections", "after_transpose", "after_rotary"]
    names: tuple[str, str] = ("q_norm", "k_norm")


PER_HEAD: QKNorm = QKNorm(lambda _heads, dim: RMSNorm(dim), "heads")
"""Qwen 3's."""


class GroupedQueryAttention(Module):
    """Llama's attention: projections to query, key and value, rotary embedding, attention, output projection.

    hidden, heads, kv_heads, head_dim: sizes; query [b, heads, s, head_dim], key and value [b, kv_heads, s, head_dim].
    bias: the query, key and value projections have one.
    out_bias: the output projection has one.
    fused: query, key and value are one projection `qkv_proj`.
    qk_norm: the norm of queries and keys; True is Qwen 3's.
    rotate: applies the rotary embedding; None: the layer has none.
    dropout: probability of dropout on the attention probabilities.
    out_dropout: probability of dropout on the output.
    window: sliding window in tokens; the cache keeps no more than that.
    attn_logit_softcapping: soft-cap the scores of eager attention (Gemma 2).
    clip_qkv: clamp the projections in place (OLMo).
    sinks: each head has a learned score of its own (gpt-oss).
    key_multiplier: multiply the keys by a number (Falcon H1).
    caches_full_length: the cache keeps every token despite the window.
    out_norm: makes a norm before the output projection (BitNet).
    out: attribute name of the output projection.
    query_scaling: applied to the rotated queries (Ministral 3).
    """

    scope = "attention"

    def __init__(
        self,
        hidden: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        *,
        bias: bool = False,
        out_bias: bool = False,
        fused: bool = False,
        qk_norm: QKNorm | bool = False,
        rotate: Rotate | None = apply_rotary,
        dropout: float = 0.0,
        out_dropout: float = 0.0,
        window: int | None = None,
        attn_logit_softcapping: bool = False,
        clip_qkv: bool = False,
        sinks: bool = False,
        key_multiplier: bool = False,
        caches_full_length: bool = False,
        out_norm: Callable[[], Module] | None = None,
        out: str = "o_proj",
        query_scaling: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.repeats = heads // kv_heads
        self.dropout, self.out_dropout = dropout, out_dropout
        self.window = window
        self.cached_window = None if caches_full_length else window
        self.rotate = rotate
        self.query_scaling = query_scaling
        self.attn_logit_softcapping, self.clip_qkv, self.key_multiplier = (
            attn_logit_softcapping,
            clip_qkv,
            key_multiplier,
        )
        self.fused = fused
        self.sinks = Parameter(heads, group="attention") if sinks else None
        self.out = out
        if fused:
            setattr(self, out, Linear(heads * head_dim, hidden, bias=out_bias, group="attention"))
            self.qkv_proj = Linear(hidden, (heads + 2 * kv_heads) * head_dim, bias=bias, group="attention")
        else:
            self.q_proj = Linear(hidden, heads * head_dim, bias=bias, group="attention")
            self.k_proj = Linear(hidden, kv_heads * head_dim, bias=bias, group="attention")
            self.v_proj = Linear(hidden, kv_heads * head_dim, bias=bias, group="attention")
            setattr(self, out, Linear(heads * head_dim, hidden, bias=out_bias, group="attention"))
        self.attn_sub_norm = None if out_norm is None else out_norm()
        self.qk_norm = PER_HEAD if qk_norm is True else qk_norm or None
        if self.qk_norm is not None:
            setattr(self, self.qk_norm.names[0], self.qk_norm.make(heads, head_dim))
            setattr(self, self.qk_norm.names[1], self.qk_norm.make(kv_heads, head_dim))

    def _norms(self, *places: str) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
        """The norms of query and key, if they stand at one of `places`."""
        if self.qk_norm is None or self.qk_norm.at not in places:
            return _as_it_is, _as_it_is
        return vars(self)[self.qk_norm.names[0]], vars(self)[self.qk_norm.names[1]]

    def _split(self, x: Tensor) -> Tensor:
        return ops.view(x, *x.shape[:-1], -1, self.head_dim)

    def _project(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Hidden states [b, s, h] to query, key and value [b, heads, s, d], and one projection that they are cut of."""
        if self.fused:
            qkv = self.qkv_proj(hidden)
            counts = (self.heads, self.kv_heads, self.kv_heads)
            pieces = [ops.narrow(qkv, -1, count * self.head_dim) for count in counts]
            query, key, value = (ops.transpose(self._split(piece), 1, 2) for piece in pieces)
            return query, key, value, qkv
        at = None if self.qk_norm is None else self.qk_norm.at
        if at == "projection" or self.clip_qkv:
            q_norm, k_norm = self._norms("projection")
            query = q_norm(self.q_proj(hidden))
            key = k_norm(self.k_proj(hidden))
            value = self.v_proj(hidden)
            if self.clip_qkv:
                query, key, value = (ops.clamp_(x, of_view=self.q_proj.bias is not None) for x in (query, key, value))
            query = ops.transpose(self._split(query), 1, 2)
            key = ops.transpose(self._split(key), 1, 2)
            value = ops.transpose(self._split(value), 1, 2)
            return query, key, value, None
        if at == "after_projections":
            q_norm, k_norm = self._norms("after_projections")
            query = self._split(self.q_proj(hidden))
            key = self._split(self.k_proj(hidden))
            value = self._split(self.v_proj(hidden))
            query = q_norm(query)
            key = k_norm(key)
            return ops.transpose(query, 1, 2), ops.transpose(key, 1, 2), ops.transpose(value, 1, 2), None
        q_norm, k_norm = self._norms("heads")
        query = ops.transpose(q_norm(self._split(self.q_proj(hidden))), 1, 2)
        key = ops.transpose(k_norm(self._split(self.k_proj(hidden))), 1, 2)
        if self.key_multiplier:
            key = ops.mul_scalar(key)
        value = ops.transpose(self._split(self.v_proj(hidden)), 1, 2)
        return query, key, value, None

    def forward(self, hidden: Tensor, rotation: Rotation, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Hidden states [b, s, h] to [b, s, h], and the probabilities where they exist."""
        query, key, value, _projected = self._project(hidden)
        q_norm, k_norm = self._norms("after_transpose")
        query = q_norm(query)
        key = k_norm(key)
        if self.rotate is not None:
            query, key, *_held = self.rotate(query, key, *rotation)
        if self.query_scaling is not None:
            query = self.query_scaling(query)
        q_norm, k_norm = self._norms("after_rotary")
        query = q_norm(query)
        key = k_norm(key)
        if (cache := run_context(query).cache) is not None:
            key, value = cache.update(self, key, value, self.cached_window)
        out, weights = attend(
            query,
            key,
            value,
            mask,
            self.repeats,
            self.dropout,
            attn_logit_softcapping=self.attn_logit_softcapping,
            sinks=self.sinks,
        )
        out = ops.contiguous(ops.reshape(out, *hidden.shape[:-1], -1))
        if self.attn_sub_norm is not None:
            out = self.attn_sub_norm(out)
        out = vars(self)[self.out](out)
        out = ops.dropout(out, self.out_dropout)
        return out, weights


def _as_it_is(x: Tensor) -> Tensor:
    return x
