"""Attention with a position bias that is added to the scores, and T5's, which learns it by distance."""

from __future__ import annotations

from memcalc import ops
from memcalc.autograd.graph import AccumulateGrad
from memcalc.autograd.tensor import Tensor
from memcalc.config.reader import Config
from memcalc.nn.kv_cache import Cache
from memcalc.nn.layers.attention_backends import sdpa, split_heads
from memcalc.nn.layers.linear import Embedding, Linear
from memcalc.nn.module import Module
from memcalc.nn.run_context import run_context
from memcalc.tables.dtypes import BOOL, FP32, INT64


def attend_with_bias(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, bias: Tensor, dropout: float, *, causal: bool
) -> tuple[Tensor, Tensor | None]:
    """Attention output [b, s, h, d] with `bias` [1, h, s, t], and the probabilities where they are made.

    Fused attention takes the bias as its mask, in row-major order; where it would have relied on its own causal flag,
    the causal mask is laid into the bias.
    """
    if run_context(query).attention != "eager":
        causal = causal and mask is None and query.shape[2] > 1
        additive = _bias_as_mask(bias, mask, query, key, causal=causal)
        return sdpa(query, key, value, additive, 1, dropout), None
    weights = ops.mul_scalar(ops.matmul(query, ops.transpose(key, 2, 3)))
    weights = ops.add(weights, bias)
    if mask is not None:
        weights = ops.add(weights, mask)
    weights = ops.softmax(weights)
    weights = ops.dropout(weights, dropout)
    out = ops.matmul(weights, value)
    return ops.contiguous(ops.transpose(out, 1, 2)), weights


def _bias_as_mask(bias: Tensor, mask: Tensor | None, query: Tensor, key: Tensor, *, causal: bool) -> Tensor:
    if mask is None and causal:
        tape, length, seen = query.tape, query.shape[2], key.shape[2]
        rows = ops.unsqueeze(tape.empty((length,), INT64), 1)
        mask = ops.compare(rows, ops.unsqueeze(tape.empty((seen,), INT64), 0))
        del rows
        mask = ops.view(mask, 1, 1, length, seen)
    if mask is None:
        return ops.contiguous(bias)
    if mask.dtype is BOOL:
        return ops.contiguous(ops.where(mask, bias))
    return ops.contiguous(ops.add(bias, mask))


class RelativeAttention(Module):
    """T5's attention, whose scores get a bias by distance: one block of a stack makes it, the others take it over.

    In UMT5 (`umt5`) every block makes its own.
    """

    def __init__(self, c: Config, *, has_bias: bool, decoder: bool, causal: bool, umt5: bool) -> None:
        hidden, heads, dim = c.integer("d_model"), c.integer("num_heads"), c.integer("d_kv")
        self.heads, self.dim, self.decoder, self.causal = heads, dim, decoder, causal
        self.q = Linear(hidden, heads * dim, group="attention")
        self.k = Linear(hidden, heads * dim, group="attention")
        self.v = Linear(hidden, heads * dim, group="attention")
        self.o = Linear(heads * dim, hidden, group="attention")
        table = Embedding(c.integer("relative_attention_num_buckets"), heads, group="attention") if has_bias else None
        self.relative_attention_bias = table
        self.dropout = c.probability("dropout_rate")
        self.umt5 = umt5

    def forward(
        self, hidden: Tensor, mask: Tensor | None, states: Tensor | None, bias: Tensor | None, cache: Cache | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """[b, s, h] to [b, s, h], the bias to share, and the probabilities.

        Keys and values come from `states` [b, t, h] if given, else from the hidden states.
        """
        query = split_heads(self.q(hidden), self.dim)
        current = hidden if states is None else states
        cached = None if cache is None or states is None else cache.cross_attention_key_values(self)
        if cached is not None:
            key, value = cached
        else:
            key = split_heads(self.k(current), self.dim)
            value = split_heads(self.v(current), self.dim)
            if cache is not None:
                key, value = cache.update(self, key, value)
        if bias is None:
            bias = self._bias(query, key.shape[-2])
        out, weights = attend_with_bias(query, key, value, mask, bias, self.dropout, causal=self.causal)
        out = ops.contiguous(ops.reshape(out, *hidden.shape[:-1], -1))
        out = self.o(out)
        return out, None if self.umt5 else bias, weights

    def _bias(self, query: Tensor, seen: int) -> Tensor:
        """The bias [1, heads, s, t]: zeros in cross-attention, which checkpointing makes a leaf of the graph."""
        tape, length = query.tape, query.shape[2]
        if self.relative_attention_bias is None:
            bias = tape.empty((1, self.heads, length, seen), query.dtype)
            if run_context(tape).checkpointing and tape.grad_enabled and not self.umt5:
                bias.node = AccumulateGrad(tape, "attention", None)
                if tape.phase == "forward":
                    tape.leaves.append(bias)
            return bias
        positions = ops.add_scalar(ops.unsqueeze(tape.empty((length,), INT64), 1))
        memory = ops.unsqueeze(tape.empty((seen,), INT64), 0)
        distance = ops.sub(memory, positions)
        buckets = buckets_of(distance, bidirectional=not self.decoder, keeps_logarithm=self.umt5)
        values = self.relative_attention_bias(buckets)
        return ops.unsqueeze(ops.permute(values, 2, 0, 1), 0)


def buckets_of(distance: Tensor, *, bidirectional: bool, keeps_logarithm: bool) -> Tensor:
    """The bucket [s, t] of each distance, by way of the tensors that its logarithm takes."""
    buckets = None
    if bidirectional:
        buckets = ops.add_scalar(ops.mul_scalar(ops.to(ops.compare(distance), INT64)))
        distance = ops.empty_like(distance)
    else:
        distance = ops.neg(ops.minimum(distance, ops.empty_like(distance)))
    small = ops.compare(distance)
    logarithm = ops.mul_scalar(ops.mul_scalar(ops.log(ops.mul_scalar(ops.to(distance, FP32)))))
    large = ops.to(logarithm, INT64)
    if not keeps_logarithm:
        del logarithm
    large = ops.add_scalar(large)
    large = ops.minimum(large, ops.empty_like(large))
    chosen = ops.empty_like(small, INT64)
    return ops.add_scalar(chosen) if buckets is None else ops.add_(buckets, chosen)
