"""Megatron-Core's transformer layer: attention with one projection for query, key and value, and the MLP.

Source: megatron/core/transformer/{transformer_layer,attention,mlp}.py of Megatron-Core 0.16 with the layers of its
local spec; what Transformer Engine's keep of the same tensors is the same. Tensors are [s, b, h].
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from memcalc import ops
from memcalc.autograd.checkpointing import reentrant
from memcalc.autograd.tape import BEFORE, TEMPORARY, Allocation
from memcalc.autograd.tensor import Storage, Tensor, contiguous_stride
from memcalc.nn.layers.norms import LayerNorm
from memcalc.nn.module import Module, Parameter
from memcalc.nn.run_context import run_context
from memcalc.parallel import megatron_ops
from memcalc.parallel.megatron_ops import TensorRanks
from memcalc.tables.dtypes import FP32


@dataclass(frozen=True)
class LayerSizes:
    """One layer, as all ranks together hold it.

    heads, kv_heads, head_dim: of attention.
    width: inner width of the MLP.
    gated: whether the MLP is SwiGLU; else GELU.
    bias: whether linear layers add biases.
    qkv_bias: whether the projection to query, key and value does.
    qk_norm: whether queries and keys are normed by head.
    """

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    width: int
    gated: bool = True
    bias: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    layer_norm: bool = False
    dropout: float = 0.0
    attention_dropout: float = 0.0

    def norm(self, width: int) -> Module:
        """A norm of the layer's kind."""
        return LayerNorm(width) if self.layer_norm else FusedRMSNorm(width)


class FusedRMSNorm(Module):
    """RMSNorm in one kernel: keeps its input and the reciprocal roots."""

    scope = "norms"

    def __init__(self, width: int) -> None:
        self.weight = Parameter(width, group="norms")

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., width] to [..., width]."""
        return ops.rms_norm(hidden, self.weight)


class ColumnParallelLinear(Module):
    """A linear layer divided by its outputs over tensor-parallel ranks."""

    def __init__(self, inputs: int, outputs: int, ranks: TensorRanks, *, bias: bool, group: str) -> None:
        self.weight = Parameter(outputs // ranks.size, inputs, group=group)
        self.bias = Parameter(outputs // ranks.size, group=group) if bias else None
        self.ranks = ranks

    def forward(self, x: Tensor, *, adds_bias: bool = True) -> Tensor:
        """[s, b, in] to [s, b, out / ranks]."""
        out = megatron_ops.linear(x, self.weight, self.ranks, column=True)
        return out if self.bias is None or not adds_bias else ops.add(out, self.bias)


class RowParallelLinear(Module):
    """A linear layer divided by its inputs, whose bias the caller adds."""

    def __init__(self, inputs: int, outputs: int, ranks: TensorRanks, *, bias: bool, group: str) -> None:
        self.weight = Parameter(outputs, inputs // ranks.size, group=group)
        self.bias = Parameter(outputs, group=group) if bias else None
        self.ranks = ranks

    def forward(self, x: Tensor) -> Tensor:
        """[s, b, in / ranks] to [s, b, out], or to this rank's part of the sequence."""
        return megatron_ops.reduce_output(megatron_ops.linear(x, self.weight, self.ranks, column=False), self.ranks)


class SelfAttention(Module):
    """Attention of one rank's heads."""

    scope = "attention"
    window = None
    recomputes_core = True
    """Whether selective checkpointing runs the core of attention again."""

    def __init__(self, sizes: LayerSizes, ranks: TensorRanks) -> None:
        self.heads, self.kv_heads = sizes.heads // ranks.size, sizes.kv_heads // ranks.size
        self.head_dim, self.dropout = sizes.head_dim, sizes.attention_dropout
        inner, both = sizes.heads * sizes.head_dim, 2 * sizes.kv_heads * sizes.head_dim
        make = partial(ColumnParallelLinear, ranks=ranks, group="attention")
        self.linear_proj = RowParallelLinear(inner, sizes.hidden, ranks, bias=sizes.bias, group="attention")
        self.linear_qkv = make(sizes.hidden, inner + both, bias=sizes.bias or sizes.qkv_bias)
        self.q_layernorm = sizes.norm(sizes.head_dim) if sizes.qk_norm else None
        self.k_layernorm = sizes.norm(sizes.head_dim) if sizes.qk_norm else None

    def _query_key_value(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        qkv = self.linear_qkv(hidden)
        repeats = self.heads // self.kv_heads
        qkv = ops.view(qkv, *qkv.shape[:2], self.kv_heads, (repeats + 2) * self.head_dim)
        query, key, value = ops.split(qkv, [repeats * self.head_dim, self.head_dim, self.head_dim], 3)
        query = ops.reshape(query, *query.shape[:2], -1, self.head_dim)
        if self.q_layernorm is not None and self.k_layernorm is not None:
            query = self.q_layernorm(query)
            key = self.k_layernorm(key)
        return query, key, value

    def forward(self, hidden: Tensor, angles: Tensor | None, mask: Tensor | None = None) -> Tensor:
        """[s, b, h] to [s, b, h], without the bias."""
        query, key, value = self._query_key_value(hidden)
        if angles is not None:
            query = _rotated(query, angles)
            key = _rotated(key, angles)
        run = run_context(query)
        core = partial(_core, dropout=self.dropout)
        if run.selective and self.recomputes_core and query.tape.grad_enabled:
            run.recomputed_attentions += 1
            out = reentrant(query.tape, core, query, key, value, mask)
        else:
            out = core(query, key, value, mask)
        return self.linear_proj(out)


def _rotated(x: Tensor, angles: Tensor) -> Tensor:
    """x [s, b, heads, d] turned by angles [s, 1, 1, d]: cos and sin are made anew for each."""
    cos = ops.to(ops.mul_scalar(ops.cos(angles)), x.dtype)
    sin = ops.to(ops.mul_scalar(ops.sin(angles)), x.dtype)
    first, second = ops.chunk(x, 2, -1)
    left = ops.mul(x, cos)
    turned = ops.add(left, ops.mul(ops.cat((ops.mul_scalar(second), first), -1), sin))
    del left
    return ops.cat((turned,), -1)


def _core(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, dropout: float) -> Tensor:
    """Attention of [s, b, heads, d], to [s, b, heads * d]; with a mask, written out (`DotProductAttention`)."""
    length, batch, heads, dim = query.shape
    if mask is not None:
        return _written_out(query, key, value, mask, dropout)
    query, key, value = (ops.permute(x, 1, 2, 0, 3) for x in (query, key, value))
    out = ops.scaled_dot_product_attention(query, key, value, None, dropout, is_causal=True)
    return ops.reshape(ops.permute(out, 2, 0, 1, 3), length, batch, heads * dim)


def _written_out(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, dropout: float) -> Tensor:
    """Scores and their softmax in fp32, each a tensor of its own. What the scores are added to stands elsewhere."""
    length, batch, heads, dim = query.shape
    if (repeats := heads // key.shape[2]) > 1:
        wide = (ops.expand(ops.unsqueeze(x, 3), *x.shape[:3], repeats, dim) for x in (key, value))
        key, value = (ops.reshape(x, length, batch, heads, dim) for x in wide)
    query, key = (ops.reshape(x, length, batch * heads, dim) for x in (query, key))
    shape = (batch * heads, length, length)
    standing = Storage(query.tape, Allocation(TEMPORARY, "", 0, BEFORE))
    beside = Tensor(shape, contiguous_stride(shape), query.dtype, standing)
    keys = ops.transpose(ops.transpose(key, 0, 1), 1, 2)
    scores = ops.view(ops.baddbmm(beside, ops.transpose(query, 0, 1), keys, scaled=True), batch, heads, length, length)
    probs = _softmax(scores, mask)
    probs = ops.dropout(probs, dropout)
    value = ops.reshape(value, length, batch * heads, dim)
    context = ops.bmm(ops.view(probs, *shape), ops.transpose(value, 0, 1))
    context = ops.permute(ops.view(context, batch, heads, length, dim), 2, 0, 1, 3)
    return ops.view(ops.contiguous(context), length, batch, heads * dim)


def _softmax(scores: Tensor, mask: Tensor) -> Tensor:
    masked = ops.masked_fill_(ops.to(scores, FP32), mask)
    return ops.to(ops.softmax(masked), scores.dtype)


class MLP(Module):
    """SwiGLU with both projections in one, or GELU."""

    scope = "MLP"

    def __init__(self, sizes: LayerSizes, ranks: TensorRanks) -> None:
        up = 2 * sizes.width if sizes.gated else sizes.width
        self.linear_fc1 = ColumnParallelLinear(sizes.hidden, up, ranks, bias=sizes.bias, group="MLP")
        self.linear_fc2 = RowParallelLinear(sizes.width, sizes.hidden, ranks, bias=sizes.bias, group="MLP")
        self.gated = sizes.gated

    def forward(self, hidden: Tensor) -> Tensor:
        """[s, b, h] to [s, b, h], without the bias."""
        inner = self.linear_fc1(hidden, adds_bias=False)
        bias = self.linear_fc1.bias
        if self.gated:
            inner = megatron_ops.fused_swiglu(inner if bias is None else ops.add(inner, bias))
        else:
            inner = ops.gelu(inner) if bias is None else megatron_ops.fused_bias_gelu(inner, bias)
        return self.linear_fc2(inner)


class TransformerLayer(Module):
    """Attention, then the MLP, each added to the residual stream."""

    scope = "residual stream"
    recomputes_mlp = False
    """Whether selective checkpointing runs the MLP again."""

    def __init__(self, sizes: LayerSizes, ranks: TensorRanks) -> None:
        self.input_layernorm = sizes.norm(sizes.hidden)
        self.self_attention = SelfAttention(sizes, ranks)
        self.pre_mlp_layernorm = sizes.norm(sizes.hidden)
        self.mlp = MLP(sizes, ranks)
        self.dropout = sizes.dropout

    def forward(self, hidden: Tensor, angles: Tensor | None, mask: Tensor | None = None) -> Tensor:
        """[s, b, h] to [s, b, h]."""
        attended = self._attention(hidden, angles, mask)
        return self._feed_forward(attended)

    def _attention(self, hidden: Tensor, angles: Tensor | None, mask: Tensor | None) -> Tensor:
        normed = self.input_layernorm(hidden)
        out = self.self_attention(normed, angles, mask)
        return megatron_ops.bias_dropout_add(out, self.self_attention.linear_proj.bias, hidden, self.dropout)

    def _feed_forward(self, hidden: Tensor) -> Tensor:
        normed = self.pre_mlp_layernorm(hidden)
        tape = hidden.tape
        again = self.recomputes_mlp and run_context(tape).selective and tape.grad_enabled
        if again:
            run_context(tape).recomputed_attentions += 1
        out = reentrant(tape, self.mlp, normed) if again else self.mlp(normed)
        return megatron_ops.bias_dropout_add(out, self.mlp.linear_fc2.bias, hidden, self.dropout)


class LayerGroup(Module):
    """Layers that are checkpointed together (`--recompute-num-layers`)."""

    def __init__(self, sizes: LayerSizes, ranks: TensorRanks, count: int) -> None:
        self.layers = [TransformerLayer(sizes, ranks) for _ in range(count)]

    def forward(self, hidden: Tensor, angles: Tensor | None, mask: Tensor | None = None) -> Tensor:
        """[s, b, h] to [s, b, h]."""
        for layer in self.layers:
            hidden = layer(hidden, angles, mask)
        return hidden
