"""The mixer of gated delta nets (Qwen 3 Next, Qwen 3.5), and the gated attention between them."""

from __future__ import annotations

from dataclasses import dataclass

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.common.assumption import Assumption
from memcalc.nn.layers.attention_backends import attend
from memcalc.nn.layers.linear import Linear
from memcalc.nn.layers.masks import RECURRENT
from memcalc.nn.layers.mlp import activation
from memcalc.nn.layers.norms import GemmaRMSNorm
from memcalc.nn.layers.recurrent.causal_conv import CausalConv
from memcalc.nn.layers.recurrent.gated_delta_rule import chunk_rule, token_rule
from memcalc.nn.layers.recurrent.ssd_scan import masked
from memcalc.nn.layers.rotary import Rotation, rotary_of_part
from memcalc.nn.module import Module, Parameter
from memcalc.nn.run_context import run_context
from memcalc.nn.state_space_kernels import LinearAttentionMixer
from memcalc.tables.dtypes import FP32

STATE = "recurrent states"
NOTE = Assumption(
    "delta_net_kernels",
    "delta nets run in plain PyTorch; where the package flash-linear-attention is installed they take less",
)


class NormThenGate(Module):
    """RMSNorm in fp32, cast back and times its weight, then times an activated gate in fp32."""

    scope = "norms"

    def __init__(self, width: int) -> None:
        self.weight = Parameter(width, group="norms")

    def forward(self, hidden: Tensor, gate: Tensor) -> Tensor:
        """[..., width] to [..., width]."""
        dtype = hidden.dtype
        hidden = ops.to(hidden, FP32)
        variance = ops.mean(ops.pow(hidden))
        hidden = ops.mul(hidden, ops.rsqrt(ops.add_scalar(variance)))
        hidden = ops.mul(self.weight, ops.to(hidden, dtype))
        hidden = ops.mul(hidden, ops.silu(ops.to(gate, FP32)))
        return ops.to(hidden, dtype)


@dataclass(frozen=True)
class DeltaShape:
    """Sizes of a gated delta net: `k_heads` keys of `k_dim`, `v_heads` values of `v_dim`, and the convolution's."""

    k_heads: int
    k_dim: int
    v_heads: int
    v_dim: int
    kernel: int

    @property
    def widths(self) -> list[int]:
        """Queries, keys and values, as the convolution gives them."""
        keys = self.k_heads * self.k_dim
        return [keys, keys, self.v_heads * self.v_dim]


class GatedDeltaNet(LinearAttentionMixer):
    """Projections to query, key, value, gate, rate and decay; a causal convolution; the delta rule; a norm; output.

    With `interleaved` (Qwen 3 Next) two projections give all of them, key head by key head.
    """

    scope = "delta net"
    window = RECURRENT
    assumption = NOTE

    def __init__(self, hidden: int, shape: DeltaShape, act: str, *, interleaved: bool) -> None:
        self.shape, self.interleaved = shape, interleaved
        inner = shape.widths[2]
        self.dt_bias = Parameter(shape.v_heads, group="delta net")
        self.A_log = Parameter(shape.v_heads, group="delta net")
        self.conv1d = CausalConv(sum(shape.widths), shape.kernel, activation(act), bias=False)
        if interleaved:
            self.in_proj_qkvz = Linear(hidden, sum(shape.widths) + inner, group="delta net")
            self.in_proj_ba = Linear(hidden, 2 * shape.v_heads, group="delta net")
        self.norm = NormThenGate(shape.v_dim)
        self.out_proj = Linear(inner, hidden, group="delta net")
        if not interleaved:
            self.in_proj_qkv = Linear(hidden, sum(shape.widths), group="delta net")
            self.in_proj_z = Linear(hidden, inner, group="delta net")
            self.in_proj_b = Linear(hidden, shape.v_heads, group="delta net")
            self.in_proj_a = Linear(hidden, shape.v_heads, group="delta net")

    def _sorted(self, qkvz: Tensor, ba: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Query and key by key head, value and gate by value head, rate and decay, from what lies by key head."""
        shape, lead = self.shape, qkvz.shape[:-1]
        each = shape.v_heads // shape.k_heads
        qkvz = ops.view(qkvz, *lead, shape.k_heads, -1)
        ba = ops.view(ba, *lead, shape.k_heads, 2 * each)
        query, key, value, gate = ops.split(qkvz, [shape.k_dim, shape.k_dim, each * shape.v_dim, each * shape.v_dim], 3)
        rate, decay = ops.split(ba, [each, each], 3)
        value = ops.reshape(value, *lead, -1, shape.v_dim)
        gate = ops.reshape(gate, *lead, -1, shape.v_dim)
        rate = ops.reshape(rate, *lead, shape.v_heads)
        decay = ops.reshape(decay, *lead, shape.v_heads)
        return query, key, value, gate, rate, decay

    def forward(self, hidden: Tensor, rotation: object, mask: Tensor | None) -> tuple[Tensor, None]:
        """[b, s, h] to [b, s, h], as an attention answers, without rotary embedding and probabilities."""
        shape, cache, lead = self.shape, run_context(hidden).cache, hidden.shape[:2]
        hidden = masked(hidden, mask)
        seen = cache is not None and cache.has_state(self, STATE)
        if self.interleaved:
            projected = self.in_proj_qkvz(hidden), self.in_proj_ba(hidden)
            query, key, value, gate, rate, decay = self._sorted(*projected)
            query, key, value = [ops.reshape(x, *lead, -1) for x in (query, key, value)]
            mixed = ops.cat((query, key, value), -1)
            mixed = ops.transpose(mixed, 1, 2)
        else:
            mixed = ops.transpose(self.in_proj_qkv(hidden), 1, 2)
            gate = self.in_proj_z(hidden)
            gate = ops.reshape(gate, *lead, -1, shape.v_dim)
            rate = self.in_proj_b(hidden)
            decay = self.in_proj_a(hidden)
        mixed = self.conv1d.remembered(mixed, self)
        mixed = self.conv1d(mixed, self, lead[1])
        mixed = ops.transpose(mixed, 1, 2)
        query, key, value = ops.split(mixed, shape.widths, -1)
        query = ops.reshape(query, *lead, -1, shape.k_dim)
        key = ops.reshape(key, *lead, -1, shape.k_dim)
        value = ops.reshape(value, *lead, -1, shape.v_dim)
        beta = ops.sigmoid(rate)
        step = ops.mul(
            ops.neg(ops.exp(ops.to(self.A_log, FP32))), ops.softplus(ops.add(ops.to(decay, FP32), self.dt_bias))
        )
        state_shape = (lead[0], shape.v_heads, shape.k_dim, shape.v_dim)
        state = cache.state(self, state_shape, FP32, hidden, STATE) if cache is not None and seen else None
        last: Tensor | None
        if state is not None and lead[1] == 1:
            once = ops.fla_recurrent if self.fused_kernels else token_rule
            out, last = once(query, key, value, beta, step, state)
        else:
            rule = ops.fla_gated_delta_rule if self.fused_kernels else chunk_rule
            out, last = rule(query, key, value, beta, step, state, keep=cache is not None)
        if cache is not None and last is not None:
            stored = cache.state(self, state_shape, last.dtype, last, STATE)
            stored.node, stored.slot = last.node, last.slot  # a copy: it holds what led to it, in training too
        out = ops.reshape(out, -1, shape.v_dim)
        gate = ops.reshape(gate, -1, shape.v_dim)
        out = self.norm(out, gate)
        out = ops.reshape(out, *lead, -1)
        return self.out_proj(out), None


class GatedAttention(Module):
    """Grouped-query attention with Gemma's norms on query and key, a rotary embedding of part of them, and a gate.

    The query projection gives the gate too; its sigmoid multiplies what the output projection gets.
    """

    scope = "attention"

    def __init__(
        self, hidden: int, heads: int, kv_heads: int, head_dim: int, *, bias: bool = False, dropout: float = 0.0
    ) -> None:
        self.head_dim, self.repeats, self.dropout = head_dim, heads // kv_heads, dropout
        self.window = None
        self.q_proj = Linear(hidden, 2 * heads * head_dim, bias=bias, group="attention")
        self.k_proj = Linear(hidden, kv_heads * head_dim, bias=bias, group="attention")
        self.v_proj = Linear(hidden, kv_heads * head_dim, bias=bias, group="attention")
        self.o_proj = Linear(heads * head_dim, hidden, bias=bias, group="attention")
        self.q_norm = GemmaRMSNorm(head_dim)
        self.k_norm = GemmaRMSNorm(head_dim)

    def _heads(self, x: Tensor) -> Tensor:
        return ops.view(x, *x.shape[:-1], -1, self.head_dim)

    def forward(self, hidden: Tensor, rotation: Rotation, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Hidden states [b, s, h] to [b, s, h], and the probabilities where they exist."""
        lead = hidden.shape[:-1]
        query, gate = ops.chunk(ops.view(self.q_proj(hidden), *lead, -1, 2 * self.head_dim), 2, -1)
        gate = ops.reshape(gate, *lead, -1)
        query = ops.transpose(self.q_norm(query), 1, 2)
        key = ops.transpose(self.k_norm(self._heads(self.k_proj(hidden))), 1, 2)
        value = ops.transpose(self._heads(self.v_proj(hidden)), 1, 2)
        query, key = rotary_of_part(query, key, *rotation)
        if (cache := run_context(query).cache) is not None:
            key, value = cache.update(self, key, value, self.window)
        out, weights = attend(query, key, value, mask, self.repeats, self.dropout)
        out = ops.contiguous(ops.reshape(out, *lead, -1))
        out = ops.mul(out, ops.sigmoid(gate))
        return self.o_proj(out), weights
