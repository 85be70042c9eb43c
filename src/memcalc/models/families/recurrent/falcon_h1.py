"""Falcon H1: attention and a Mamba 2 mixer side by side in every block, with a multiplier on nearly everything."""

from __future__ import annotations

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.config.reader import Config
from memcalc.models.common.causal_lm import DecoderModel
from memcalc.models.common.heads import decoder
from memcalc.models.family import Family, llama_sizes, table
from memcalc.nn.layers.grouped_query_attention import GroupedQueryAttention
from memcalc.nn.layers.linear import Embedding, Linear
from memcalc.nn.layers.masks import RECURRENT
from memcalc.nn.layers.mlp import activation
from memcalc.nn.layers.norms import RMSNorm
from memcalc.nn.layers.recurrent.mamba2 import Mamba2Mixer, Mamba2Shape, head_width
from memcalc.nn.layers.rotary import RotaryEmbedding, Rotation
from memcalc.nn.model import Network
from memcalc.nn.module import Module, Parameter
from memcalc.nn.stack import Stack
from memcalc.tables.dtypes import FP32


class ScaledMLP(Module):
    """down(up(x) * act(gate(x) * a)) * b."""

    scope = "MLP"

    def __init__(self, hidden: int, width: int, act: str, *, bias: bool) -> None:
        self.gate_proj = Linear(hidden, width, bias=bias, group="MLP")
        self.up_proj = Linear(hidden, width, bias=bias, group="MLP")
        self.down_proj = Linear(width, hidden, bias=bias, group="MLP")
        self.act = activation(act)

    def forward(self, x: Tensor) -> Tensor:
        """[b, s, h] to [b, s, h]."""
        out = ops.mul(self.up_proj(x), self.act(ops.mul_scalar(self.gate_proj(x))))
        return ops.mul_scalar(self.down_proj(out))


class GroupedGatedNorm(Module):
    """RMSNorm by groups in fp32, with a gate multiplied on before or after it; the weight multiplies in fp32."""

    scope = "norms"

    def __init__(self, width: int, groups: int, *, gate_last: bool) -> None:
        self.weight = Parameter(width, group="norms")
        self.groups = groups
        self.gate_last = gate_last

    def forward(self, hidden: Tensor, gate: Tensor) -> Tensor:
        """[b, s, width] to [b, s, width]."""
        dtype, (batch, length, width) = hidden.dtype, hidden.shape
        if not self.gate_last:
            hidden = ops.mul(hidden, ops.silu(ops.to(gate, FP32)))
        hidden = ops.to(hidden, FP32)
        hidden = ops.view(hidden, batch, length, self.groups, width // self.groups)
        variance = ops.mean(ops.pow(hidden))
        hidden = ops.mul(hidden, ops.rsqrt(ops.add_scalar(variance)))
        hidden = ops.mul(ops.view(self.weight, self.groups, width // self.groups), hidden)
        hidden = ops.view(hidden, batch, length, width)
        if self.gate_last:
            hidden = ops.mul(hidden, ops.silu(ops.to(gate, FP32)))
        return ops.to(hidden, dtype)


class FalconH1Block(Module):
    """Norm, then mixer and attention, both added; norm, MLP, add. Both masks come together."""

    scope = "residual stream"

    def __init__(self, mlp: Module, mixer: Module, attention: Module, hidden: int) -> None:
        self.feed_forward = mlp
        self.mamba = mixer
        self.self_attn = attention
        self.input_layernorm = RMSNorm(hidden)
        self.pre_ff_layernorm = RMSNorm(hidden)

    def forward(
        self, hidden: Tensor, rotation: Rotation, mask: dict[int | None, Tensor | None], position_ids: Tensor
    ) -> Tensor:
        """[b, s, h] to [b, s, h]."""
        residual = hidden
        hidden = self.input_layernorm(hidden)
        mixed, _ = self.mamba(hidden, None, mask[RECURRENT])
        mixed = ops.mul_scalar(mixed)
        attended, _weights = self.self_attn(ops.mul_scalar(hidden), rotation, mask[None])
        attended = ops.mul_scalar(attended)
        hidden = ops.add(mixed, attended)
        hidden = ops.add(residual, hidden)
        residual = hidden
        hidden = self.pre_ff_layernorm(hidden)
        hidden = self.feed_forward(hidden)
        return ops.add(residual, hidden)


def falcon_h1(c: Config, architecture: str | None) -> Network:
    """Falcon H1 in every size, without the `mamba_ssm` kernels."""
    hidden, depth = c.integer("hidden_size"), c.integer("num_hidden_layers")
    inner = c.optional("mamba_d_ssm") or c.integer("mamba_expand") * hidden
    shape = Mamba2Shape(
        c.integer("mamba_n_heads"),
        head_width(c, inner),
        c.integer("mamba_d_state"),
        c.divides("mamba_n_groups", "mamba_n_heads"),
        c.integer("mamba_chunk_size"),
        c.integer("mamba_d_conv"),
    )
    act, bias = c.text("hidden_act"), c.flag("attention_bias")

    def block(_layer: int) -> Module:
        norm = None
        if c.flag("mamba_rms_norm"):
            norm = GroupedGatedNorm(shape.inner, shape.groups, gate_last=c.flag("mamba_norm_before_gate"))
        mixer = Mamba2Mixer(
            hidden,
            shape,
            act,
            norm,
            conv_bias=c.flag("mamba_conv_bias"),
            bias=c.flag("mamba_proj_bias"),
            out_bias=c.flag("projectors_bias"),
            mup_multiplier=True,
        )
        attention = GroupedQueryAttention(
            hidden,
            *c.heads(),
            bias=bias,
            out_bias=bias,
            key_multiplier=True,
            dropout=c.probability("attention_dropout"),
        )
        mlp = ScaledMLP(hidden, c.integer("intermediate_size"), act, bias=c.flag("mlp_bias"))
        return FalconH1Block(mlp, mixer, attention, hidden)

    embedding = Embedding(c.integer("vocab_size"), hidden)
    model = DecoderModel(
        embedding,
        Stack(["both"] * depth, block),
        RMSNorm(hidden),
        RotaryEmbedding(c.head_dim()),
        [None, RECURRENT],
        embedding_multiplier=True,
        passes_all_masks=True,
    )
    return decoder(
        c, architecture, model, hidden, embedding, tied=c.flag("tie_word_embeddings"), logit_transforms=[ops.mul_scalar]
    )


FAMILIES = table(
    Family(
        "falcon_h1",
        falcon_h1,
        llama_sizes(
            (128000, 4096, 14336, 32, 32, 8, 0),
            attention_dropout=0.0,
            mamba_n_heads=128,
            mamba_d_head="auto",
            mamba_d_ssm=1024,
            mamba_expand=2,
            mamba_n_groups=1,
            mamba_d_state=256,
            mamba_d_conv=4,
            mamba_chunk_size=256,
            mamba_conv_bias=True,
            mamba_norm_before_gate=True,
        ),
        kinds="Mamba 2 beside attention",
        verified="measured rows",
    )
)
