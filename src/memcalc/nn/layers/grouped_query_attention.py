"""Attention whose key and value heads serve groups of query heads: Llama's and that of its kin."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.nn.layers.attention_backends import attend
from memcalc.nn.layers.linear import Linear
from memcalc.nn.layers.norms import RMSNorm
from memcalc.nn.layers.rotary import Rotate, Rotation, apply_rotary
from memcalc.nn.module import Module, Parameter
from memcalc.nn.run_context import run_context


@dataclass(frozen=True)
class HeadNorm:
    """A norm over queries and keys: `make(heads, head_dim)` makes one, `at` says where it stands.

    projection: over the whole projection; heads: over [b, s, heads, d] as each is projected; later: over the same when
    all are; transposed: over [b, heads, s, d]; rotated: over the same, after the rotary embedding.
    """

    make: Callable[[int, int], Module]
    at: Literal["projection", "heads", "later", "transposed", "rotated"]
    names: tuple[str, str] = ("q_norm", "k_norm")


PER_HEAD: HeadNorm = HeadNorm(lambda _heads, dim: RMSNorm(dim), "heads")
"""Qwen 3's."""


class GroupedQueryAttention(Module):
    """Llama's attention: projections to `heads` queries and `kv_heads` keys and values of `head_dim`, rotary, output.

    `bias` is on the query, key and value projections, `out_bias` on the output's; with `fused` the three are one.
    `head_norm` stands on query and key (True: Qwen 3's), `rotate` applies the rotary embedding (None: this layer has
    none). A layer with a sliding `window` caches no more than that, or all if `cached_whole`. `softcapped` bends the
    scores of eager attention, `clipped` the projections; `out_dropout` works on the output, `out_norm` stands before
    its projection. `bend_query` is what is done to rotated queries.
    `sinks` gives each head a score of its own, `key_scaled` multiplies keys by a number. `out` names the output's
    projection.
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
        head_norm: HeadNorm | bool = False,
        rotate: Rotate | None = apply_rotary,
        dropout: float = 0.0,
        out_dropout: float = 0.0,
        window: int | None = None,
        softcapped: bool = False,
        clipped: bool = False,
        sinks: bool = False,
        key_scaled: bool = False,
        cached_whole: bool = False,
        out_norm: Callable[[], Module] | None = None,
        out: str = "o_proj",
        bend_query: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.repeats = heads // kv_heads
        self.dropout, self.out_dropout = dropout, out_dropout
        self.window = window
        self.cached_window = None if cached_whole else window
        self.rotate = rotate
        self.bend_query = bend_query
        self.softcapped, self.clipped, self.key_scaled = softcapped, clipped, key_scaled
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
        self.head_norm = PER_HEAD if head_norm is True else head_norm or None
        if self.head_norm is not None:
            setattr(self, self.head_norm.names[0], self.head_norm.make(heads, head_dim))
            setattr(self, self.head_norm.names[1], self.head_norm.make(kv_heads, head_dim))

    def _norms(self, *places: str) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
        """The norms of query and key, if they stand at one of `places`."""
        if self.head_norm is None or self.head_norm.at not in places:
            return _as_it_is, _as_it_is
        return vars(self)[self.head_norm.names[0]], vars(self)[self.head_norm.names[1]]

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
        at = None if self.head_norm is None else self.head_norm.at
        if at == "projection" or self.clipped:
            q_norm, k_norm = self._norms("projection")
            query = q_norm(self.q_proj(hidden))
            key = k_norm(self.k_proj(hidden))
            value = self.v_proj(hidden)
            if self.clipped:
                query, key, value = (ops.clamp_(x, of_view=self.q_proj.bias is not None) for x in (query, key, value))
            query = ops.transpose(self._split(query), 1, 2)
            key = ops.transpose(self._split(key), 1, 2)
            value = ops.transpose(self._split(value), 1, 2)
            return query, key, value, None
        if at == "later":
            q_norm, k_norm = self._norms("later")
            query = self._split(self.q_proj(hidden))
            key = self._split(self.k_proj(hidden))
            value = self._split(self.v_proj(hidden))
            query = q_norm(query)
            key = k_norm(key)
            return ops.transpose(query, 1, 2), ops.transpose(key, 1, 2), ops.transpose(value, 1, 2), None
        q_norm, k_norm = self._norms("heads")
        query = ops.transpose(q_norm(self._split(self.q_proj(hidden))), 1, 2)
        key = ops.transpose(k_norm(self._split(self.k_proj(hidden))), 1, 2)
        if self.key_scaled:
            key = ops.mul_scalar(key)
        value = ops.transpose(self._split(self.v_proj(hidden)), 1, 2)
        return query, key, value, None

    def forward(self, hidden: Tensor, rotation: Rotation, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Hidden states [b, s, h] to [b, s, h], and the probabilities where they exist."""
        query, key, value, _projected = self._project(hidden)
        q_norm, k_norm = self._norms("transposed")
        query = q_norm(query)
        key = k_norm(key)
        if self.rotate is not None:
            query, key, *_held = self.rotate(query, key, *rotation)
        if self.bend_query is not None:
            query = self.bend_query(query)
        q_norm, k_norm = self._norms("rotated")
        query = q_norm(query)
        key = k_norm(key)
        if (cache := run_context(query).cache) is not None:
            key, value = cache.update(self, key, value, self.cached_window)
        out, weights = attend(
            query, key, value, mask, self.repeats, self.dropout, softcapped=self.softcapped, sinks=self.sinks
        )
        out = ops.contiguous(ops.reshape(out, *hidden.shape[:-1], -1))
        if self.attn_sub_norm is not None:
            out = self.attn_sub_norm(out)
        out = vars(self)[self.out](out)
        out = ops.dropout(out, self.out_dropout)
        return out, weights


def _as_it_is(x: Tensor) -> Tensor:
    return x
