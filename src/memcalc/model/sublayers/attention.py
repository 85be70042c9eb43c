"""Attention over query, key and value [b, heads, s, d], by the implementation that the setup asks for."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

from memcalc.model import ops
from memcalc.model.checkpointing import checkpointed
from memcalc.model.module import Module, Parameter
from memcalc.model.sublayers.linear import Linear
from memcalc.model.sublayers.norms import RMSNorm
from memcalc.model.sublayers.rotary import Rotate, Rotation, apply_rotary
from memcalc.model.tensor import Tensor
from memcalc.records import frozen
from memcalc.tables.dtypes import FP32


def repeat_kv(x: Tensor, repeats: int) -> Tensor:
    """[b, kv, s, d] to [b, kv · repeats, s, d], a copy unless there is nothing to repeat."""
    batch, heads, length, dim = x.shape
    if repeats == 1:
        return x
    x = ops.expand(ops.unsqueeze(x, 2), batch, heads, repeats, length, dim)
    return ops.reshape(x, batch, heads * repeats, length, dim)


def eager(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, repeats: int, dropout: float = 0.0,
    *, softcapped: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Scores, fp32 softmax and probabilities as tensors: [b, s, h, d] and the probabilities [b, h, s, t]."""
    key = repeat_kv(key, repeats)
    value = repeat_kv(value, repeats)
    weights = ops.scale(ops.matmul(query, ops.transpose(key, 2, 3)))
    if softcapped:
        weights = ops.scale(weights)
        weights = ops.tanh(weights)
        weights = ops.scale(weights)
    if mask is not None:
        weights = ops.add(weights, mask)
    weights = ops.to(ops.softmax(weights, FP32), query.dtype)
    weights = ops.dropout(weights, dropout)
    out = ops.matmul(weights, value)
    return ops.contiguous(ops.transpose(out, 1, 2)), weights


def eager_with_sinks(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, sinks: Tensor, repeats: int, dropout: float
) -> tuple[Tensor, Tensor]:
    """Eager attention in which each head has one more score, that no value belongs to (gpt-oss); no fp32 softmax."""
    key = repeat_kv(key, repeats)
    value = repeat_kv(value, repeats)
    weights = ops.scale(ops.matmul(query, ops.transpose(key, 2, 3)))
    if mask is not None:
        weights = ops.add(weights, mask)
    sinks = ops.expand(ops.reshape(sinks, 1, -1, 1, 1), query.shape[0], -1, query.shape[-2], -1)
    scores = ops.cat([weights, sinks], -1)
    scores = ops.subtract(scores, ops.max_over(scores, keepdim=True)[0])
    probs = ops.softmax(scores, scores.dtype)
    weights = ops.to(ops.dropout(ops.narrow(probs, -1, probs.shape[-1] - 1), dropout), value.dtype)
    out = ops.matmul(weights, value)
    return ops.contiguous(ops.transpose(out, 1, 2)), weights


def sdpa(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, repeats: int, dropout: float = 0.0) -> Tensor:
    """Fused attention: grouped heads are native without a mask, repeated with one.

    The queries of a single token are seen as several of fewer heads instead.
    """
    batch, _, length, dim = query.shape
    if repeats > 1 and not (mask is None and key.shape[-1] == value.shape[-1] <= 256):
        if length == 1:
            query = ops.reshape(query, batch, -1, repeats, dim)
        else:
            key = repeat_kv(key, repeats)
            value = repeat_kv(value, repeats)
    out = ops.scaled_dot_product_attention(query, key, value, mask, dropout)
    out = ops.reshape(out, batch, -1, length, value.shape[-1])
    return ops.contiguous(ops.transpose(out, 1, 2))


def attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, repeats: int = 1, dropout: float = 0.0,
    *, softcapped: bool = False, sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Attention output [b, s, h, d], and the probabilities where the implementation makes them.

    Only eager attention knows how to cap scores softly; the fused kernels leave it out. `sinks` are a score per head.
    """
    core = partial(_core, repeats=repeats, dropout=dropout, softcapped=softcapped, sinks=sinks)
    return _kept_or_not(core, query, key, value, mask)


Core = Callable[[Tensor, Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor | None]]


def _kept_or_not(
    core: Core, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Run the core of attention, and again in backward where only it is checkpointed."""
    tape = query.tape
    if not tape.selective or not tape.grad_enabled:
        return core(query, key, value, mask)
    tape.recomputed_attentions += 1
    out: tuple[Tensor, Tensor | None] = checkpointed(tape, core, query, key, value, mask)
    return out


def _core(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *,
    repeats: int, dropout: float, softcapped: bool, sinks: Tensor | None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    if query.tape.attention == "eager" and sinks is not None:
        return eager_with_sinks(query, key, value, mask, sinks, repeats, dropout)
    if query.tape.attention == "eager":
        return eager(query, key, value, mask, repeats, dropout, softcapped=softcapped)
    return sdpa(query, key, value, mask, repeats, dropout), None


def attend_same_dtype(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, *, cast_back: bool = True
) -> tuple[Tensor, Tensor | None]:
    """`attend` as GPT-2 and BERT write it: eager softmax in the scores' own dtype, heads never repeated.

    Under autocast softmax gives fp32; with `cast_back` dropout works on probabilities in the values' dtype (GPT-2).
    """
    return _kept_or_not(partial(_same_dtype, dropout=dropout, cast_back=cast_back), query, key, value, mask)


def _same_dtype(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, dropout: float, cast_back: bool
) -> tuple[Tensor, Tensor | None]:
    if query.tape.attention != "eager":
        return sdpa(query, key, value, mask, 1, dropout), None
    weights = ops.scale(ops.matmul(query, ops.transpose(key, 2, 3)))
    if mask is not None:
        weights = ops.add(weights, mask)
    weights = ops.softmax(weights)
    if cast_back:
        weights = ops.to(weights, value.dtype)
    weights = ops.dropout(weights, dropout)
    out = ops.matmul(weights, value)
    return ops.transpose(out, 1, 2), weights


@frozen
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
        self, hidden: int, heads: int, kv_heads: int, head_dim: int, *,
        bias: bool = False, out_bias: bool = False, fused: bool = False, head_norm: HeadNorm | bool = False,
        rotate: Rotate | None = apply_rotary, dropout: float = 0.0, out_dropout: float = 0.0,
        window: int | None = None, softcapped: bool = False, clipped: bool = False, sinks: bool = False,
        key_scaled: bool = False, cached_whole: bool = False, out_norm: Callable[[], Module] | None = None,
        out: str = "o_proj", bend_query: Callable[[Tensor], Tensor] | None = None,
    ) -> None:  # fmt: skip
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
            key = ops.scale(key)
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
        if query.tape.cache is not None:
            key, value = query.tape.cache.update(self, key, value, self.cached_window)
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
