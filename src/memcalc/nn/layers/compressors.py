"""DeepSeek-V4's compressed entries: one for every few tokens, and which of them a token attends to."""

from __future__ import annotations

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.nn.kv_cache import Cache
from memcalc.nn.layers.hyper_connections import Fp32RMSNorm
from memcalc.nn.layers.linear import Linear
from memcalc.nn.layers.rotary import Rotation, spread
from memcalc.nn.layers.rotary_interleaved import rotate_pairs
from memcalc.nn.module import Buffer, Module, Parameter
from memcalc.nn.run_context import run_context
from memcalc.tables.dtypes import BOOL, FP32, INT64


class TwoRotaryEmbeddings(Module):
    """Tables of cos and sin [rows, s, dim / 2] for plain (`main`) and for compressed (`compress`) attention."""

    scope = "rotary embedding"

    def __init__(self, dim: int) -> None:
        self.main_inv_freq, self.main_original_inv_freq = Buffer(dim // 2), Buffer(dim // 2)
        self.compress_inv_freq, self.compress_original_inv_freq = Buffer(dim // 2), Buffer(dim // 2)

    def forward(self, x: Tensor, position_ids: Tensor) -> Rotation:
        """The pair for `position_ids`; `x` only gives its dtype."""
        freqs = ops.mul(ops.to(ops.unsqueeze(position_ids, -1), FP32), self.compress_inv_freq)
        cos = ops.mul_scalar(ops.cos(freqs))
        sin = ops.mul_scalar(ops.sin(freqs))
        return ops.to(cos, x.dtype), ops.to(sin, x.dtype)


def rotate_tail(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The last elements of heads [b, h, s, d] rotated by pairs in fp32, twice as many as the table is wide."""
    cos = ops.unsqueeze(spread(cos), 1)
    sin = ops.unsqueeze(spread(sin), 1)
    width = cos.shape[-1]
    nope, rope = ops.narrow(x, -1, x.shape[-1] - width), ops.narrow(x, -1, width)
    kept = ops.mul(ops.to(rope, FP32), cos)
    rotated = ops.to(ops.add(kept, ops.mul(ops.to(rotate_pairs(rope), FP32), sin)), x.dtype)
    del kept
    return ops.cat([nope, rotated], -1)


class Compressor(Module):
    """One entry for every `rate` tokens: their softmax-gated sum, normalised and rotated.

    overlaps: each token contributes to its own window's entry and to the next one's, by halves of the projections.
    """

    scope = "attention"

    def __init__(self, hidden: int, head_dim: int, rope_dim: int, rate: int, *, overlaps: bool) -> None:
        self.rate, self.head_dim, self.overlaps = rate, head_dim, overlaps
        width = head_dim * (2 if overlaps else 1)
        self.kv_proj = Linear(hidden, width, group="attention")
        self.gate_proj = Linear(hidden, width, group="attention")
        self.position_bias = Parameter(rate, width, dtype=FP32, group="attention")
        self.kv_norm = Fp32RMSNorm(head_dim)
        self.rotary_emb = TwoRotaryEmbeddings(rope_dim)

    def compressed(self, hidden: Tensor) -> tuple[Tensor, object]:
        """Hidden states [b, s, h] to entries [b, s / rate, head_dim] of all tokens so far, and what stays bound."""
        cache = run_context(hidden).cache
        kv = self.kv_proj(hidden)
        gate = self.gate_proj(hidden)
        if cache is not None:
            kv, gate = self._buffered(cache, "kv", kv), self._buffered(cache, "gate", gate)
        usable = kv.shape[1] // self.rate * self.rate
        if cache is not None:
            cache.set_state(self, "kv", ops.narrow(kv, 1, kv.shape[1] - usable))
            cache.set_state(self, "gate", ops.narrow(gate, 1, gate.shape[1] - usable))
        if usable:
            entries, held = self._closed(ops.narrow(kv, 1, usable), ops.narrow(gate, 1, usable))
        else:
            entries, held = hidden.tape.empty((hidden.shape[0], 0, self.head_dim), kv.dtype), None
        if cache is not None:
            entries = cache.update_entries(self, entries, self.rate)
        return entries, (kv, gate, held)

    def _buffered(self, cache: Cache, name: str, x: Tensor) -> Tensor:
        """What was left over, and `x` [b, s, width] after it."""
        if not cache.has_state(self, name) or not cache.get_state(self, name).shape[1]:
            return x
        return ops.cat([cache.get_state(self, name), x], 1)

    def _closed(self, chunk_kv: Tensor, chunk_gate: Tensor) -> tuple[Tensor, object]:
        """Entries of whole windows [b, n · rate, width], and what stays bound."""
        tape, batch, windows = chunk_kv.tape, chunk_kv.shape[0], chunk_kv.shape[1] // self.rate
        shape = (batch, windows, self.rate, -1)
        chunk_kv = ops.view(chunk_kv, *shape)
        chunk_gate = ops.add(ops.view(chunk_gate, *shape), self.position_bias)
        if self.overlaps:
            new_kv, new_gate = self._overlapping(chunk_kv), self._overlapping(chunk_gate)
            new_kv, new_gate = (
                self._after_prior(new_kv, chunk_kv, "kv"),
                self._after_prior(new_gate, chunk_gate, "gate"),
            )
        else:
            new_kv, new_gate = chunk_kv, chunk_gate
        weights = ops.to(ops.softmax(new_gate, FP32), new_kv.dtype)
        entries = self.kv_norm(ops.sum(ops.mul(new_kv, weights), 2))
        del weights
        counted = tape.empty((windows,), INT64)
        places = ops.unsqueeze(ops.add_scalar(ops.mul_scalar(counted)), 0)
        del counted
        cos, sin = self.rotary_emb(entries, ops.expand(places, batch, windows))
        entries = ops.squeeze(rotate_tail(ops.unsqueeze(entries, 1), cos, sin), 1)
        return entries, (chunk_gate, new_kv, new_gate, places, cos, sin)

    def _after_prior(self, new: Tensor, chunk: Tensor, name: str) -> Tensor:
        """Overlapping windows, of which the first follows what an earlier call left; the last is kept for the next."""
        cache = run_context(chunk).cache
        if cache is None:
            return new
        prior = cache.get_state(self, f"overlap {name}") if cache.has_state(self, f"overlap {name}") else None
        last = ops.clone(ops.narrow(ops.select(chunk, 1), -1, self.head_dim), contiguous=True)
        cache.set_state(self, f"overlap {name}", last)
        return new if prior is None else ops.copy_slice_(new, prior)

    def _overlapping(self, chunk: Tensor) -> Tensor:
        """Windows [b, n, rate, 2 · d] as [b, n, 2 · rate, d]: the window before, then its own."""
        batch, windows, rate, _ = chunk.shape
        out = chunk.tape.empty((batch, windows, 2 * rate, self.head_dim), chunk.dtype)
        out = ops.copy_slice_(out, ops.narrow(chunk, -1, self.head_dim))
        if windows > 1:
            out = ops.copy_slice_(out, ops.narrow(ops.narrow(chunk, 1, windows - 1), -1, self.head_dim))
        return out


class HeavyCompressor(Compressor):
    """Every entry is seen by all later tokens."""

    def forward(self, hidden: Tensor, q_residual: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor | None]:
        """Entries [b, 1, t, head_dim], and what is added to the scores [b, 1, s, t]."""
        entries, _held = self.compressed(hidden)
        compressed_kv = ops.unsqueeze(entries, 1)
        tape, (batch, length, _), count = hidden.tape, hidden.shape, compressed_kv.shape[2]
        if length == 1 or not count:
            return compressed_kv, None
        numbers = tape.empty((count,), INT64)
        threshold = ops.add_scalar(ops.add_scalar(position_ids))
        bias = tape.empty((batch, 1, length, count), compressed_kv.dtype)
        future = tape.empty((position_ids.shape[0], 1, length, count), BOOL)
        bias = ops.masked_fill(bias, future)
        del numbers, threshold, future
        return compressed_kv, bias


class Indexer(Compressor):
    """Chooses for each token the compressed entries that it attends to (the lightning indexer)."""

    def __init__(self, hidden: int, rank: int, heads: int, head_dim: int, rope_dim: int, rate: int, top: int) -> None:
        super().__init__(hidden, head_dim, rope_dim, rate, overlaps=True)
        self.top = top
        self.q_b_proj = Linear(rank, heads * head_dim, group="attention")
        self.weights_proj = Linear(hidden, heads, group="attention")

    def forward(self, hidden: Tensor, q_residual: Tensor, position_ids: Tensor) -> Tensor:
        """Indices [b, s, k]."""
        tape, (batch, length, _) = hidden.tape, hidden.shape
        keys, _held = self.compressed(hidden)
        cos, sin = self.rotary_emb(hidden, position_ids)
        query = ops.transpose(ops.view(self.q_b_proj(q_residual), batch, length, -1, self.head_dim), 1, 2)
        query = ops.transpose(rotate_tail(query, cos, sin), 1, 2)
        scores = self._scores(query, keys, hidden)
        count = keys.shape[1]
        top = min(self.top, count)
        if not count:
            return ops.topk(scores, top)[1]
        threshold = ops.add_scalar(ops.add_scalar(position_ids))
        entries = tape.empty((count,), INT64)
        future = tape.empty((position_ids.shape[0], length, count), BOOL)
        scores = ops.masked_fill(scores, future)
        indices = ops.topk(scores, top)[1]
        invalid = ops.empty_like(indices, BOOL)
        filled = ops.empty_like(indices)
        chosen = ops.empty_like(indices)
        del threshold, entries, filled, invalid
        return chosen

    def _scores(self, query: Tensor, keys: Tensor, hidden: Tensor) -> Tensor:
        """Scores [b, s, t] of queries [b, s, heads, d] against keys [b, t, d]."""
        wide = ops.unsqueeze(ops.to(ops.transpose(keys, -1, -2), FP32), 1)
        scores = ops.matmul(ops.to(query, FP32), wide)
        del wide
        scores = ops.mul_scalar(ops.relu(scores))
        weights = ops.mul_scalar(ops.to(self.weights_proj(hidden), FP32))
        return ops.sum(ops.mul(scores, ops.unsqueeze(weights, -1)), 2)


class SparseCompressor(Compressor):
    """Each token sees the entries that an indexer chooses."""

    def __init__(self, hidden: int, head_dim: int, rope_dim: int, rate: int, indexer: Indexer) -> None:
        super().__init__(hidden, head_dim, rope_dim, rate, overlaps=True)
        self.indexer = indexer

    def forward(self, hidden: Tensor, q_residual: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor | None]:
        """Entries [b, 1, t, head_dim], and what is added to the scores [b, 1, s, t]."""
        entries, _held = self.compressed(hidden)
        compressed_kv = ops.unsqueeze(entries, 1)
        indices = self.indexer(hidden, q_residual, position_ids)
        tape, (batch, length, _), count = hidden.tape, hidden.shape, compressed_kv.shape[2]
        valid = ops.empty_like(indices, BOOL)
        filled = ops.empty_like(indices)
        safe = ops.empty_like(indices)
        del filled
        bias = tape.empty((batch, 1, length, count + 1), compressed_kv.dtype)
        del valid, safe
        return compressed_kv, ops.narrow(bias, -1, count)
