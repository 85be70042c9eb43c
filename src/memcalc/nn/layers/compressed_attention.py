"""DeepSeek-V4's attention: one key that is the value too, in a window, and compressed entries of what came before."""

from __future__ import annotations

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.nn.layers.attention_backends import attend
from memcalc.nn.layers.compressors import rotate_tail
from memcalc.nn.layers.hyper_connections import Fp32RMSNorm, unweighted_rms_norm
from memcalc.nn.layers.linear import Linear
from memcalc.nn.layers.rotary import Rotation
from memcalc.nn.module import Module, Parameter
from memcalc.nn.run_context import run_context
from memcalc.tables.dtypes import FP32


class GroupedLinear(Module):
    """A linear layer for each of `groups` groups of the input (`DeepseekV4GroupedLinear`)."""

    def __init__(self, inputs: int, outputs: int, groups: int) -> None:
        self.weight = Parameter(outputs, inputs, group="attention")
        self.groups = groups

    def forward(self, x: Tensor) -> Tensor:
        """[..., groups, in] to [..., groups, out / groups]."""
        lead, width = x.shape[:-2], x.shape[-1]
        weight = ops.transpose(ops.view(self.weight, self.groups, -1, width), 1, 2)
        x = ops.transpose(ops.reshape(x, -1, self.groups, width), 0, 1)
        out = ops.transpose(ops.bmm(x, weight), 0, 1)
        return ops.reshape(out, *lead, self.groups, -1)


class CompressedAttention(Module):
    """The attention of one layer.

    groups, rank: the output projection goes through as many groups of this rank.
    compressor: makes entries of earlier tokens; None: the window alone.
    """

    scope = "attention"

    def __init__(
        self,
        hidden: int,
        heads: int,
        head_dim: int,
        *,
        q_rank: int,
        groups: int,
        rank: int,
        window: int,
        dropout: float,
        compressor: Module | None,
    ) -> None:
        self.heads, self.head_dim, self.groups, self.window, self.dropout = heads, head_dim, groups, window, dropout
        self.q_a_proj = Linear(hidden, q_rank, group="attention")
        self.q_a_norm = Fp32RMSNorm(q_rank)
        self.q_b_proj = Linear(q_rank, heads * head_dim, group="attention")
        self.kv_proj = Linear(hidden, head_dim, group="attention")
        self.kv_norm = Fp32RMSNorm(head_dim)
        self.o_a_proj = GroupedLinear(heads * head_dim // groups, groups * rank, groups)
        self.o_b_proj = Linear(groups * rank, hidden, group="attention")
        self.sinks = Parameter(heads, dtype=FP32, group="attention")
        self.compressor = compressor

    def forward(
        self, hidden: Tensor, rotation: tuple[Rotation, Rotation], mask: Tensor | None, position_ids: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Hidden states [b, s, h] to [b, s, h], and the probabilities."""
        lead = hidden.shape[:-1]
        cos, sin = rotation[self.compressor is not None]
        q_residual = self.q_a_norm(self.q_a_proj(hidden))
        query = ops.transpose(ops.view(self.q_b_proj(q_residual), *lead, -1, self.head_dim), 1, 2)
        query = unweighted_rms_norm(query)
        query = rotate_tail(query, cos, sin)
        kv = ops.transpose(ops.view(self.kv_norm(self.kv_proj(hidden)), *lead, -1, self.head_dim), 1, 2)
        kv = rotate_tail(kv, cos, sin)
        if (cache := run_context(kv).cache) is not None:
            if self.compressor is None:
                kv = cache.update(self, kv, kv, self.window)[0]
            else:
                kv = cache.update_single(self, kv, self.window)
        bias: Tensor | None = None
        if self.compressor is not None:
            compressed, bias = self.compressor(hidden, q_residual, position_ids)
            kv = ops.cat([kv, compressed], 2)
        if mask is not None and kv.shape[2] > mask.shape[-1]:
            if bias is not None:
                mask = ops.cat([mask, ops.to(bias, mask.dtype)], -1)
            else:
                mask = ops.pad(mask, -1, kv.shape[2] - mask.shape[-1])
        out, weights = attend(query, kv, kv, mask, self.heads, self.dropout, sinks=self.sinks)
        out = ops.transpose(rotate_tail(ops.transpose(out, 1, 2), cos, ops.neg(sin)), 1, 2)
        grouped = ops.reshape(out, *lead, self.groups, -1)
        grouped = ops.reshape(self.o_a_proj(grouped), *lead, -1)
        return self.o_b_proj(grouped), weights
