"""Hybrids of state-space mixers, attention and experts: Jamba, Nemotron H."""

from __future__ import annotations

from functools import partial

from memcalc.config.reader import Config
from memcalc.errors import ConfigError
from memcalc.models.common.causal_lm import DecoderModel
from memcalc.models.common.decoder import dense_decoder, gated_mlp
from memcalc.models.common.heads import decoder
from memcalc.models.families.recurrent.mamba import in_fp32
from memcalc.models.family import Family, llama_sizes, sizes, table
from memcalc.nn.layers.decoder_blocks import MixerBlock
from memcalc.nn.layers.grouped_query_attention import GroupedQueryAttention
from memcalc.nn.layers.linear import Embedding, Linear
from memcalc.nn.layers.masks import RECURRENT
from memcalc.nn.layers.mixture_of_experts import Experts, MixtureOfExperts, SharedAndRoutedExperts, swiglu
from memcalc.nn.layers.mlp import PlainMLP, activation
from memcalc.nn.layers.norms import RMSNorm
from memcalc.nn.layers.recurrent.mamba1 import MambaMixer
from memcalc.nn.layers.recurrent.mamba2 import GatedRMSNorm, Mamba2Mixer, Mamba2Shape
from memcalc.nn.layers.routers import GroupLimitedRouter, TopKRouter
from memcalc.nn.model import Network
from memcalc.nn.module import Module
from memcalc.nn.stack import Stack


def jamba(c: Config, architecture: str | None) -> Network:
    """Jamba: Mamba 1 mixers and a few layers of attention, and experts in place of every other MLP; no positions."""
    hidden, depth, count = c.integer("hidden_size"), c.integer("num_hidden_layers"), c.integer("num_experts")
    per_token, state = c.within("num_experts_per_tok", "num_experts"), c.integer("mamba_d_state")
    period, offset = c.integer("attn_layer_period"), c.integer("attn_layer_offset", minimum=0)
    experts_period, experts_offset = c.integer("expert_layer_period"), c.integer("expert_layer_offset", minimum=0)
    rank = -(-hidden // 16) if c.get("mamba_dt_rank") == "auto" else c.integer("mamba_dt_rank")
    recurrent = [layer % period != offset for layer in range(depth)]
    mlp = gated_mlp(c)

    def mixture() -> Module:
        gate = swiglu(activation(c.text("hidden_act")))
        experts = Experts(hidden, c.integer("intermediate_size"), count, per_token, gate)
        return MixtureOfExperts(TopKRouter(hidden, count, per_token, normalise=False, cast="hidden"), experts)

    def mixer(layer: int) -> Module | None:
        if not recurrent[layer]:
            return None
        return MambaMixer(
            hidden,
            c.integer("mamba_expand") * hidden,
            state,
            rank,
            c.integer("mamba_d_conv"),
            c.text("hidden_act"),
            conv_bias=c.flag("mamba_conv_bias"),
            bias=c.flag("mamba_proj_bias"),
            fused_first=False,
            norms=lambda: [RMSNorm(rank), RMSNorm(state), RMSNorm(state)],
        )

    with_experts = [count > 1 and layer % experts_period == experts_offset for layer in range(depth)]
    return dense_decoder(
        c,
        architecture,
        windows=[RECURRENT if kind else None for kind in recurrent],
        rope_layers=[False] * depth,
        make_attention=mixer,
        mlp=[mixture if kind else mlp for kind in with_experts],
        rotary=False,
    )


_LETTERS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
_OLD_NAMES = {"mamba": "linear_attention", "attention": "full_attention"}


def _block_types(c: Config) -> list[str]:
    """What Nemotron H's layers are: a list, or a string of letters."""
    given = c.items("layers_block_type")
    if given is not None:
        types = [_OLD_NAMES.get(str(kind), str(kind)) for kind in given]
    else:
        types = [_LETTERS.get(letter, letter) for letter in c.text("hybrid_override_pattern")]
    for kind in types:
        if kind not in _LETTERS.values():
            raise ConfigError(
                f"{c.where} has the layer {kind[:20]!r} in 'layers_block_type' or 'hybrid_override_pattern'; known are "
                f"{', '.join(_LETTERS.values())}, or the letters {''.join(_LETTERS)}."
            )
    return types


def _latent_experts(c: Config) -> Module:
    hidden, count, per_token = (
        c.integer("hidden_size"),
        c.integer("n_routed_experts"),
        c.within("num_experts_per_tok", "n_routed_experts"),
    )
    latent, act, bias = c.optional("moe_latent_size"), c.text("mlp_hidden_act"), c.flag("mlp_bias")
    experts = Experts(
        latent or hidden, c.integer("moe_intermediate_size"), count, per_token, activation(act), gated=False
    )
    gate = GroupLimitedRouter(
        hidden,
        count,
        per_token,
        groups=c.integer("n_group"),
        top_groups=c.within("topk_group", "n_group"),
        normalise=c.flag("norm_topk_prob"),
    )
    shared = PlainMLP(hidden, c.integer("moe_shared_expert_intermediate_size"), act, bias=bias)
    around = None
    if latent is not None:
        around = (
            Linear(hidden, latent, bias=bias, group="experts"),
            Linear(latent, hidden, bias=bias, group="experts"),
        )
    return SharedAndRoutedExperts(experts, gate, shared, around)


def nemotron_h(c: Config, architecture: str | None) -> Network:
    """Nemotron H and 3: every layer is a Mamba 2 mixer, attention without positions, an MLP, or experts."""
    hidden, types = c.integer("hidden_size"), _block_types(c)
    shape = Mamba2Shape(
        c.integer("mamba_num_heads"),
        c.integer("mamba_head_dim"),
        c.integer("ssm_state_size"),
        c.divides("n_groups", "mamba_num_heads"),
        c.integer("chunk_size"),
        c.integer("conv_kernel"),
    )
    norm = partial(RMSNorm, hidden, scale_in="fp32")

    def block(layer: int) -> Module:
        if types[layer] == "linear_attention":
            bias = c.flag("use_bias")
            mixer: Module = Mamba2Mixer(
                hidden,
                shape,
                c.text("mamba_hidden_act"),
                GatedRMSNorm(shape.inner, shape.groups),
                conv_bias=c.flag("use_conv_bias"),
                bias=bias,
                out_bias=bias,
            )
            return MixerBlock(mixer, norm())
        if types[layer] == "full_attention":
            dropout = c.probability("attention_dropout")
            return MixerBlock(GroupedQueryAttention(hidden, *c.heads(), rotate=None, dropout=dropout), norm())
        if types[layer] == "moe":
            return MixerBlock(_latent_experts(c), norm(), alone=True)
        mlp = PlainMLP(hidden, c.integer("intermediate_size"), c.text("mlp_hidden_act"), bias=c.flag("mlp_bias"))
        return MixerBlock(mlp, norm(), alone=True)

    embedding = Embedding(c.integer("vocab_size"), hidden)
    model = DecoderModel(embedding, Stack(types, block), norm(), None, [None, RECURRENT])
    return decoder(c, architecture, model, hidden, embedding, tied=False, logit_transforms=[in_fp32])


FAMILIES = table(
    Family(
        "jamba",
        jamba,
        llama_sizes(
            (65536, 4096, 14336, 32, 32, 8, 0),
            attention_dropout=0.0,
            num_experts=16,
            num_experts_per_tok=2,
            expert_layer_period=2,
            expert_layer_offset=1,
            attn_layer_period=8,
            attn_layer_offset=4,
            mamba_d_state=16,
            mamba_d_conv=4,
            mamba_expand=2,
            mamba_dt_rank="auto",
            mamba_conv_bias=True,
            pad_token_id=0,
            router_aux_loss_coef=0.001,
        ),
        {"num_local_experts": "num_experts"},
        kinds="Mamba, attention, experts",
        verified="measured rows",
    ),
    Family(
        "nemotron_h",
        nemotron_h,
        sizes(
            (131072, 4096, 21504, 0, 32, 8, 0),
            hybrid_override_pattern="ME*-",
            head_dim=128,
            attention_dropout=0.0,
            mlp_hidden_act="relu2",
            ssm_state_size=128,
            mamba_num_heads=128,
            mamba_head_dim=64,
            mamba_hidden_act="silu",
            n_groups=8,
            conv_kernel=4,
            chunk_size=128,
            use_conv_bias=True,
            n_routed_experts=8,
            num_experts_per_tok=2,
            moe_intermediate_size=7688,
            moe_shared_expert_intermediate_size=7688,
            n_group=1,
            topk_group=1,
            norm_topk_prob=True,
        ),
        {
            "layer_types": "layers_block_type",
            "num_local_experts": "n_routed_experts",
            "mamba_n_groups": "n_groups",
            "mamba_d_conv": "conv_kernel",
            "mamba_conv_bias": "use_conv_bias",
            "mamba_chunk_size": "chunk_size",
        },
        kinds="Mamba 2, attention, MLP, experts",
    ),
)
