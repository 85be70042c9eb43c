"""Decoders of known attention with experts of another kind: ERNIE 4.5, Hunyuan, MiniMax M2, FlexOLMo."""

from __future__ import annotations

from functools import partial
from typing import Any

from memcalc.config.reader import Config
from memcalc.models.common.decoder import biases, dense_decoder, gated_mlp
from memcalc.models.family import Family, llama_sizes, table
from memcalc.nn.layers.decoder_blocks import POST_NORM, DecoderBlock
from memcalc.nn.layers.grouped_query_attention import QKNorm
from memcalc.nn.layers.mixture_of_experts import Experts, MixtureOfExperts, swiglu
from memcalc.nn.layers.mlp import GatedMLP, activation
from memcalc.nn.layers.norms import RMSNorm
from memcalc.nn.layers.rotary import RotaryEmbedding, rotary_cast_back, rotary_of_part
from memcalc.nn.layers.rotary_interleaved import rotary_pairs_upcast
from memcalc.nn.layers.routers import BiasCorrectedRouter, TopKRouter
from memcalc.nn.model import Network
from memcalc.nn.module import Module


def _experts(c: Config, width: str, count: str, per_token: str = "num_experts_per_tok") -> Experts:
    gate = swiglu(activation(c.text("hidden_act")))
    return Experts(c.integer("hidden_size"), c.integer(width), c.integer(count), c.within(per_token, count), gate)


def ernie4_5_moe(c: Config, architecture: str | None) -> Network:
    """ERNIE 4.5 with experts: the dense one's attention; shared and routed experts."""
    bias, hidden, depth = c.flag("use_bias"), c.integer("hidden_size"), c.integer("num_hidden_layers")
    first, every = c.integer("moe_layer_start_index", minimum=0), c.integer("moe_layer_interval")
    given = c.get("moe_layer_end_index")
    last = depth - 1 if given in (None, -1) else c.integer("moe_layer_end_index", minimum=0)
    shared = c.integer("moe_num_shared_experts", minimum=0)

    def mixture() -> Module:
        experts = _experts(c, "moe_intermediate_size", "moe_num_experts", "moe_k")
        router = BiasCorrectedRouter(hidden, experts.count, experts.per_token, softmax=True)
        width = c.integer("moe_intermediate_size") * shared
        shared_experts = GatedMLP(hidden, width, c.text("hidden_act"), bias=bias) if shared else None
        return MixtureOfExperts(router, experts, shared_experts)

    mlp = gated_mlp(c, bias=bias)
    return dense_decoder(
        c,
        architecture,
        attention={**biases(c, "use_bias"), "rotate": rotary_pairs_upcast, "dropout": 0.0},
        mlp=[mixture if first <= i <= last and (i + 1) % every == 0 else mlp for i in range(depth)],
        rotary=RotaryEmbedding(c.head_dim(), fp32=True),
    )


def hunyuan_v1_moe(c: Config, architecture: str | None) -> Network:
    """Hunyuan with experts: norms on query and key after the rotation, a router in fp32, one shared MLP."""
    hidden = c.integer("hidden_size")

    def mixture() -> Module:
        experts = _experts(c, "intermediate_size", "num_experts", "moe_topk")
        shared = GatedMLP(hidden, c.integer("intermediate_size"), c.text("hidden_act"))
        return MixtureOfExperts(TopKRouter(hidden, experts.count, experts.per_token, fp32=True), experts, shared)

    norm = QKNorm(lambda _heads, dim: RMSNorm(dim), "after_rotary", ("query_layernorm", "key_layernorm"))
    return dense_decoder(c, architecture, mlp=mixture, attention={**biases(c), "qk_norm": norm})


def minimax_m2(c: Config, architecture: str | None) -> Network:
    """MiniMax M2: norms over the whole projections of query and key, part of each head rotated."""
    head_dim = c.head_dim()
    rotated = c.optional("rotary_dim") or c.rotary_dim(head_dim)

    noisy = c.number("router_jitter_noise", 0.0) > 0

    def mixture() -> Module:
        experts = _experts(c, "intermediate_size", "num_local_experts")
        router = BiasCorrectedRouter(c.integer("hidden_size"), experts.count, experts.per_token, softmax=False)
        return MixtureOfExperts(router, experts, jitters=int(noisy))

    norm = QKNorm(lambda heads, dim: RMSNorm(heads * dim), "projection")
    attention: dict[str, Any] = {"qk_norm": norm, "rotate": rotary_of_part}
    return dense_decoder(c, architecture, mlp=mixture, attention=attention, rotary=RotaryEmbedding(rotated))


def flex_olmo(c: Config, architecture: str | None) -> Network:
    """FlexOLMo: OLMo 2 with OLMoE's experts."""
    norm = partial(RMSNorm, scale_in="mixed")

    def mixture() -> Module:
        experts = _experts(c, "intermediate_size", "num_experts")
        normalise = c.flag("norm_topk_prob")
        router = TopKRouter(c.integer("hidden_size"), experts.count, experts.per_token, normalise=normalise)
        return MixtureOfExperts(router, experts)

    attention = {
        **biases(c),
        "rotate": rotary_cast_back,
        "qk_norm": QKNorm(lambda heads, dim: norm(heads * dim), "projection"),
    }
    return dense_decoder(
        c,
        architecture,
        mlp=mixture,
        attention=attention,
        norm=norm,
        block=partial(DecoderBlock, names=POST_NORM),
        rotary=RotaryEmbedding(c.head_dim(), fp32=True),
    )


FAMILIES = table(
    Family(
        "ernie4_5_moe",
        ernie4_5_moe,
        llama_sizes(
            (103424, 2560, 12288, 28, 20, 4, 0),
            moe_intermediate_size=1536,
            moe_k=6,
            moe_num_experts=64,
            moe_num_shared_experts=2,
            moe_layer_start_index=1,
            moe_layer_interval=1,
            pad_token_id=0,
            tie_word_embeddings=True,
            router_aux_loss_coef=0.001,
        ),
        {"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k"},
        kinds="decoder, experts",
        verified="measured rows",
    ),
    Family(
        "hunyuan_v1_moe",
        hunyuan_v1_moe,
        llama_sizes(
            (290943, 4096, 11008, 32, 32, 0, 0), attention_dropout=0.0, num_experts=1, moe_topk=1, pad_token_id=0
        ),
        {"num_experts_per_tok": "moe_topk", "num_local_experts": "num_experts"},
        kinds="decoder, experts",
        verified="measured rows",
    ),
    Family(
        "minimax_m2",
        minimax_m2,
        llama_sizes(
            (200064, 3072, 1536, 62, 48, 8, 0),
            head_dim=128,
            attention_dropout=0.0,
            num_experts_per_tok=8,
            num_local_experts=256,
            router_aux_loss_coef=0.001,
        ),
        {"num_experts": "num_local_experts"},
        kinds="decoder, experts",
        verified="measured rows",
    ),
    Family(
        "flex_olmo",
        flex_olmo,
        llama_sizes(
            (100352, 4096, 11008, 32, 32, 0, 0),
            attention_dropout=0.0,
            num_experts_per_tok=5,
            num_experts=7,
            pad_token_id=100277,
            router_aux_loss_coef=0.01,
        ),
        {"num_local_experts": "num_experts"},
        kinds="decoder, experts",
        verified="measured rows",
    ),
)
