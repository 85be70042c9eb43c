"""LFM2: most layers are short gated convolutions, some are attention. In LFM2-MoE later layers have experts."""

from __future__ import annotations

from collections.abc import Callable

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.config.reader import Config
from memcalc.models.common.decoder import dense_decoder
from memcalc.models.family import Family, sizes, table
from memcalc.nn.layers.linear import Linear
from memcalc.nn.layers.masks import RECURRENT
from memcalc.nn.layers.mixture_of_experts import Experts, MixtureOfExperts, swiglu
from memcalc.nn.layers.mlp import GatedMLP
from memcalc.nn.layers.recurrent.causal_conv import CausalConv
from memcalc.nn.layers.recurrent.ssd_scan import masked
from memcalc.nn.layers.routers import SigmoidRouter
from memcalc.nn.model import Network
from memcalc.nn.module import Module


class ShortConv(Module):
    """out(c * conv(b * x)), where b, c and x are one projection."""

    scope = "convolution"
    window = RECURRENT

    def __init__(self, hidden: int, width: int, *, bias: bool) -> None:
        self.conv = CausalConv(hidden, width, None, bias=bias)
        self.in_proj = Linear(hidden, 3 * hidden, bias=bias, group="convolution")
        self.out_proj = Linear(hidden, hidden, bias=bias, group="convolution")

    def forward(self, hidden: Tensor, rotation: object, mask: Tensor | None) -> tuple[Tensor, None]:
        """[b, s, h] to [b, s, h], as an attention answers, without rotary embedding and probabilities."""
        length = hidden.shape[1]
        hidden = masked(hidden, mask)
        projected = ops.transpose(self.in_proj(hidden), 1, 2)
        b, c, x = ops.chunk(projected, 3, 1)
        hidden = ops.mul(b, x)
        hidden = self.conv.remembered(hidden, self)
        hidden = self.conv(hidden, self, length)
        out = ops.mul(c, hidden)
        out = ops.contiguous(ops.transpose(out, 1, 2))
        return self.out_proj(out), None


def _network(c: Config, architecture: str | None, types: list[str], mlp: list[Callable[[], Module]]) -> Network:
    convolved = [kind == "conv" for kind in types]
    hidden, width, bias = c.integer("hidden_size"), c.integer("conv_L_cache"), c.flag("conv_bias")
    return dense_decoder(
        c,
        architecture,
        windows=[RECURRENT if kind else None for kind in convolved],
        mlp=mlp,
        make_attention=lambda layer: ShortConv(hidden, width, bias=bias) if convolved[layer] else None,
        attention={"qk_norm": True, "dropout": 0.0},
    )


def lfm2(c: Config, architecture: str | None) -> Network:
    """LFM2."""
    hidden, depth, width = c.integer("hidden_size"), c.integer("num_hidden_layers"), c.integer("intermediate_size")
    if c.flag("block_auto_adjust_ff_dim"):
        width = int(2 * width / 3)
        if c.has("block_ffn_dim_multiplier"):
            multiple = c.integer("block_multiple_of")
            width = -(-int(c.number("block_ffn_dim_multiplier") * width) // multiple) * multiple
    attends = c.items("full_attn_idxs")
    default = ["full_attention" if attends is None or i in attends else "conv" for i in range(depth)]

    def mlp() -> Module:
        return GatedMLP(hidden, width, "silu")

    return _network(c, architecture, c.layer_types(default), [mlp] * depth)


def lfm2_moe(c: Config, architecture: str | None) -> Network:
    """LFM2 with experts after a few dense layers."""
    hidden, depth = c.integer("hidden_size"), c.integer("num_hidden_layers")
    dense = c.integer("num_dense_layers", minimum=0)
    count, per_token = c.integer("num_experts"), c.within("num_experts_per_tok", "num_experts")

    def mlp() -> Module:
        return GatedMLP(hidden, c.integer("intermediate_size"), "silu")

    def mixture() -> Module:
        experts = Experts(hidden, c.integer("moe_intermediate_size"), count, per_token, swiglu(ops.silu))
        gate = SigmoidRouter(
            hidden, count, per_token, corrected=c.flag("use_expert_bias"), normalise=c.flag("norm_topk_prob")
        )
        return MixtureOfExperts(gate, experts, gate_first=False)

    types = c.layer_types(["full_attention"] * depth)
    return _network(c, architecture, types, [mlp if layer < dense else mixture for layer in range(depth)])


FAMILIES = table(
    Family(
        "lfm2",
        lfm2,
        sizes(
            (65536, 2560, 12288, 32, 32, 8, 0),
            conv_L_cache=3,
            block_auto_adjust_ff_dim=True,
            block_ffn_dim_multiplier=1.0,
            block_multiple_of=256,
            pad_token_id=0,
            tie_word_embeddings=True,
        ),
        {"tie_embedding": "tie_word_embeddings", "block_ff_dim": "intermediate_size"},
        kinds="convolution, attention",
        verified="measured rows",
    ),
    Family(
        "lfm2_moe",
        lfm2_moe,
        sizes(
            (65536, 2048, 7168, 32, 32, 8, 0),
            moe_intermediate_size=1792,
            num_dense_layers=2,
            num_experts=32,
            num_experts_per_tok=4,
            use_expert_bias=True,
            norm_topk_prob=True,
            conv_L_cache=3,
            pad_token_id=0,
            tie_word_embeddings=True,
        ),
        {"tie_embedding": "tie_word_embeddings"},
        kinds="convolution, attention, experts",
    ),
)
