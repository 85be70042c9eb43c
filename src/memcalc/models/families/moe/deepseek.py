"""DeepSeek and its kin: shared and routed experts behind a few dense layers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from memcalc.config.reader import Config
from memcalc.errors import ConfigError
from memcalc.models.common.decoder import dense_decoder, gated_mlp, windows_by_layer_type
from memcalc.models.families.decoders.llama_variants import pattern_length
from memcalc.models.family import Family, llama_sizes, table
from memcalc.nn.layers.grouped_query_attention import QKNorm
from memcalc.nn.layers.latent_attention import LatentAttention, Rotate, rotate_interleaved
from memcalc.nn.layers.mixture_of_experts import Experts, SharedAndRoutedExperts, swiglu
from memcalc.nn.layers.mlp import GatedMLP, activation
from memcalc.nn.layers.norms import RMSNorm
from memcalc.nn.layers.rotary import (
    ComplexRotaryEmbedding,
    RotaryEmbedding,
    apply_rotary,
    rotary_complex,
    rotary_of_part,
)
from memcalc.nn.layers.routers import GroupLimitedRouter, SoftmaxGroupRouter
from memcalc.nn.model import Network
from memcalc.nn.module import Module


def latent_attention(c: Config, rotate: Rotate) -> LatentAttention:
    """The latent attention of a DeepSeek config."""
    return LatentAttention(
        c.integer("hidden_size"),
        c.integer("num_attention_heads"),
        q_rank=c.optional("q_lora_rank"),
        kv_rank=c.integer("kv_lora_rank"),
        nope_dim=c.integer("qk_nope_head_dim"),
        rope_dim=c.integer("qk_rope_head_dim"),
        value_dim=c.integer("v_head_dim"),
        bias=c.flag("attention_bias"),
        dropout=c.probability("attention_dropout"),
        rotate=rotate,
    )


def shared_and_routed(c: Config) -> SharedAndRoutedExperts:
    """Experts under a group-limited router, and shared ones."""
    gate = GroupLimitedRouter(
        c.integer("hidden_size"),
        c.integer("n_routed_experts"),
        c.within("num_experts_per_tok", "n_routed_experts"),
        groups=c.divides("n_group", "n_routed_experts"),
        top_groups=c.within("topk_group", "n_group"),
        normalise=c.flag("norm_topk_prob"),
    )
    return _with_shared(c, gate)


def _with_shared(c: Config, gate: Module, *, bias: bool = False) -> SharedAndRoutedExperts:
    hidden, width, act = c.integer("hidden_size"), c.integer("moe_intermediate_size"), c.text("hidden_act")
    experts = Experts(
        hidden,
        width,
        c.integer("n_routed_experts"),
        c.within("num_experts_per_tok", "n_routed_experts"),
        swiglu(activation(act)),
    )
    shared = GatedMLP(hidden, width * c.integer("n_shared_experts"), act, bias=bias)
    return SharedAndRoutedExperts(experts, gate, shared)


def deepseek_v2(c: Config, architecture: str | None) -> Network:
    """DeepSeek V2 and V2 Lite: softmax routing, and the rotary embedding in complex numbers."""

    def mixture(c: Config) -> Module:
        limited = c.text("topk_method") == "group_limited_greedy"
        gate = SoftmaxGroupRouter(
            c.integer("hidden_size"),
            c.integer("n_routed_experts"),
            c.within("num_experts_per_tok", "n_routed_experts"),
            groups=c.divides("n_group", "n_routed_experts") if limited else None,
            top_groups=c.within("topk_group", "n_group") if limited else None,
        )
        return _with_shared(c, gate, bias=bias)

    bias = c.flag("mlp_bias")
    return dense_decoder(
        c,
        architecture,
        make_attention=lambda _: latent_attention(c, rotary_complex),
        mlp=layered(c, mixture, bias=bias),
        rotary=ComplexRotaryEmbedding(c.integer("qk_rope_head_dim")),
    )


def deepseek_v3(c: Config, architecture: str | None) -> Network:
    """DeepSeek V3 and R1, Kimi K2, Moonlight: latent attention, dense first layers, then experts."""
    rotate = rotate_interleaved if c.flag("rope_interleave", True) else apply_rotary
    return dense_decoder(
        c,
        architecture,
        make_attention=lambda _: latent_attention(c, rotate),
        mlp=layered(c, shared_and_routed),
        rotary=RotaryEmbedding(c.integer("qk_rope_head_dim")),
    )


def glm4_moe(c: Config, architecture: str | None) -> Network:
    """GLM 4.5 and 4.6: DeepSeek's experts behind grouped-query attention, of which a part of each head is rotated."""
    attention = {
        "bias": c.flag("attention_bias"),
        "rotate": rotary_of_part,
        "qk_norm": QKNorm(lambda _, dim: RMSNorm(dim), "after_projections") if c.flag("use_qk_norm") else False,
    }
    rotary = RotaryEmbedding(c.rotary_dim(c.head_dim(), 0.5))
    return dense_decoder(c, architecture, mlp=layered(c, shared_and_routed), attention=attention, rotary=rotary)


def dots1(c: Config, architecture: str | None) -> Network:
    """dots.llm1: DeepSeek's experts behind Qwen 3's attention."""
    bias, depth, window = c.flag("attention_bias"), c.integer("num_hidden_layers"), c.optional("sliding_window")
    first = c.integer("max_window_layers", minimum=0)
    types = c.layer_types(["sliding_attention" if window and i >= first else "full_attention" for i in range(depth)])
    windows = [window if kind == "sliding_attention" else None for kind in types]
    attention = {"bias": bias, "out_bias": bias, "qk_norm": True}
    return dense_decoder(c, architecture, windows=windows, mlp=layered(c, shared_and_routed), attention=attention)


def solar_open(c: Config, architecture: str | None) -> Network:
    """Solar Open: DeepSeek's experts in every layer, behind Llama's attention."""
    attention = {"bias": c.flag("attention_bias")}
    return dense_decoder(c, architecture, mlp=partial(shared_and_routed, c), attention=attention)


def exaone_moe(c: Config, architecture: str | None) -> Network:
    """K-EXAONE: DeepSeek's experts behind EXAONE 4's attention, with norms before the sublayers."""
    slides = c.has("sliding_window")
    windows = windows_by_layer_type(c, pattern_length(c) if slides else 1)
    return dense_decoder(
        c,
        architecture,
        windows=windows,
        rope_layers=[window is not None or not slides for window in windows],
        attention={"qk_norm": QKNorm(lambda _heads, dim: RMSNorm(dim), "after_transpose")},
        mlp=layered(c, shared_and_routed),
    )


def layered(c: Config, mixture: Callable[[Config], Module], *, bias: bool = False) -> list[Callable[[], Module]]:
    """A dense MLP in the first layers, shared and routed experts in the others, or as `mlp_layer_types` says."""
    mlp, depth, given = gated_mlp(c, bias=bias), c.integer("num_hidden_layers"), c.items("mlp_layer_types")
    if given is None:
        dense = c.integer("first_k_dense_replace", minimum=0)
        given = ["dense" if layer < dense else "sparse" for layer in range(depth)]
    if len(given) != depth:
        raise ConfigError(f"{c.where} has {len(given)} 'mlp_layer_types' for {depth} layers; they must agree.")
    experts = partial(mixture, c)
    return [experts if kind == "sparse" else mlp for kind in given]


_ALIASES = {"num_local_experts": "n_routed_experts"}
V3 = llama_sizes(
    (129280, 7168, 18432, 61, 128, 0, 0),
    moe_intermediate_size=2048,
    n_shared_experts=1,
    n_routed_experts=256,
    num_experts_per_tok=8,
    n_group=8,
    topk_group=4,
    norm_topk_prob=True,
    first_k_dense_replace=3,
    q_lora_rank=1536,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    rope_interleave=True,
    attention_bias=False,
    attention_dropout=0.0,
)
FAMILIES = table(
    Family("deepseek_v3", deepseek_v3, V3, _ALIASES, kinds="decoder with latent attention, experts"),
    Family(
        "kimi_k2",
        deepseek_v3,
        V3,
        _ALIASES,
        kinds="decoder with latent attention, experts",
        verified="deepseek_v3 by another name; exact counts",
    ),
    Family(
        "deepseek_v2",
        deepseek_v2,
        llama_sizes(
            (102400, 4096, 11008, 32, 32, 0, 0),
            moe_intermediate_size=1407,
            n_shared_experts=2,
            n_routed_experts=64,
            first_k_dense_replace=0,
            topk_method="greedy",
            q_lora_rank=1536,
            kv_lora_rank=512,
            qk_nope_head_dim=128,
            qk_rope_head_dim=64,
            v_head_dim=128,
            attention_bias=False,
            attention_dropout=0.0,
        ),
        {"num_experts": "n_routed_experts"},
        kinds="decoder with latent attention, experts",
    ),
    Family(
        "glm4_moe_lite",
        deepseek_v3,
        {
            **V3,
            "vocab_size": 154880,
            "hidden_size": 2048,
            "intermediate_size": 10240,
            "moe_intermediate_size": 1536,
            "num_hidden_layers": 47,
            "num_attention_heads": 20,
            "n_routed_experts": 64,
            "num_experts_per_tok": 4,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "q_lora_rank": 768,
            "qk_nope_head_dim": 192,
            "v_head_dim": 256,
        },
        _ALIASES,
        kinds="decoder with latent attention, experts",
        verified="measured rows",
    ),
    Family(
        "solar_open",
        solar_open,
        llama_sizes(
            (196608, 4096, 0, 48, 64, 8, 0),
            moe_intermediate_size=1280,
            head_dim=128,
            n_shared_experts=1,
            n_routed_experts=128,
            num_experts_per_tok=8,
            n_group=1,
            topk_group=1,
            norm_topk_prob=True,
            attention_bias=False,
            attention_dropout=0.0,
        ),
        _ALIASES,
        kinds="decoder, experts",
        verified="measured rows",
    ),
    Family(
        "exaone_moe",
        exaone_moe,
        llama_sizes(
            (102400, 4096, 16384, 32, 32, 32, 0),
            attention_dropout=0.0,
            sliding_window=4096,
            sliding_window_pattern=4,
            first_k_dense_replace=1,
            moe_intermediate_size=1024,
            n_routed_experts=64,
            num_experts_per_tok=8,
            n_shared_experts=1,
            n_group=1,
            topk_group=1,
            norm_topk_prob=True,
            pad_token_id=0,
        ),
        {"num_experts": "n_routed_experts", "num_shared_experts": "n_shared_experts"},
        kinds="decoder, experts",
        verified="measured rows",
    ),
    Family(
        "glm4_moe",
        glm4_moe,
        llama_sizes(
            (151552, 4096, 10944, 46, 96, 8, 0),
            moe_intermediate_size=1408,
            n_shared_experts=1,
            n_routed_experts=128,
            num_experts_per_tok=8,
            n_group=1,
            topk_group=1,
            norm_topk_prob=True,
            first_k_dense_replace=1,
            use_qk_norm=False,
            attention_bias=False,
            attention_dropout=0.0,
        ),
        _ALIASES,
        kinds="decoder, experts",
    ),
    Family(
        "dots1",
        dots1,
        llama_sizes(
            (152064, 4608, 10944, 62, 32, 32, 0),
            moe_intermediate_size=1408,
            n_group=1,
            topk_group=1,
            first_k_dense_replace=0,
            norm_topk_prob=False,
            attention_bias=False,
            attention_dropout=0.0,
            sliding_window=4096,
            max_window_layers=62,
        ),
        _ALIASES,
        kinds="decoder, experts",
    ),
)
