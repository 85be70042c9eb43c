"""DeepSeek and its relatives: shared and routed experts after a few dense layers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from memcalc.autograd.tensor import Tensor
from memcalc.config.reader import Config
from memcalc.errors import ConfigError
from memcalc.models.common.decoder import dense_decoder, gated_mlp
from memcalc.models.family import Family, llama_sizes, sizes, table
from memcalc.nn.layers.latent_attention import LatentAttention, Rotate, rotate_interleaved
from memcalc.nn.layers.mixture_of_experts import Experts, SharedAndRoutedExperts, swiglu
from memcalc.nn.layers.mlp import GatedMLP, activation
from memcalc.nn.layers.norms import RMSNorm
from memcalc.nn.layers.rotary import (
    ComplexRotaryEmbedding,
    RotaryEmbedding,
    apply_rotary,
    rotary_complex,
    scaled_by_position,
)
from memcalc.nn.layers.routers import GroupLimitedRouter, SoftmaxGroupRouter, SoftmaxLimitedRouter
from memcalc.nn.model import Network
from memcalc.nn.module import Module


def latent_attention(
    c: Config, rotate: Rotate, query_scaling: Callable[[Tensor], Tensor] | None = None
) -> LatentAttention:
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
        query_scaling=query_scaling,
    )


def shared_and_routed(c: Config, *, norm: Module | None = None) -> SharedAndRoutedExperts:
    """Experts under a group-limited router, and shared ones; `norm` is one of what comes out."""
    gate = GroupLimitedRouter(
        c.integer("hidden_size"),
        c.integer("n_routed_experts"),
        c.within("num_experts_per_tok", "n_routed_experts"),
        groups=c.divides("n_group", "n_routed_experts"),
        top_groups=c.within("topk_group", "n_group"),
        normalise=c.flag("norm_topk_prob"),
    )
    return _with_shared(c, gate, norm=norm)


def _with_shared(c: Config, gate: Module, *, bias: bool = False, norm: Module | None = None) -> SharedAndRoutedExperts:
    hidden, width, act = c.integer("hidden_size"), c.integer("moe_intermediate_size"), c.text("hidden_act")
    experts = Experts(
        hidden,
        width,
        c.integer("n_routed_experts"),
        c.within("num_experts_per_tok", "n_routed_experts"),
        swiglu(activation(act)),
    )
    shared = GatedMLP(hidden, width * c.integer("n_shared_experts"), act, bias=bias)
    return SharedAndRoutedExperts(experts, gate, shared, norm=norm)


def deepseek_v2(c: Config, architecture: str | None) -> Network:
    """DeepSeek V2 and V2 Lite: softmax routing, and the rotary embedding in complex numbers."""
    bias = c.flag("mlp_bias")
    return dense_decoder(
        c,
        architecture,
        make_attention=lambda _: latent_attention(c, rotary_complex),
        mlp=layered(c, partial(softmax_routed, bias=bias), bias=bias),
        rotary=ComplexRotaryEmbedding(c.integer("qk_rope_head_dim")),
    )


def softmax_routed(c: Config, *, bias: bool = False) -> SharedAndRoutedExperts:
    """Experts under a softmax router, limited to groups where `topk_method` says so, and shared ones."""
    limited = c.text("topk_method") == "group_limited_greedy"
    gate = SoftmaxGroupRouter(
        c.integer("hidden_size"),
        c.integer("n_routed_experts"),
        c.within("num_experts_per_tok", "n_routed_experts"),
        groups=c.divides("n_group", "n_routed_experts") if limited else None,
        top_groups=c.within("topk_group", "n_group") if limited else None,
    )
    return _with_shared(c, gate, bias=bias)


def deepseek_v3(c: Config, architecture: str | None) -> Network:
    """DeepSeek V3 and R1, Kimi K2, Moonlight: latent attention, dense first layers, then experts."""
    return _latent(c, architecture, layered(c, shared_and_routed))


def axk1(c: Config, architecture: str | None) -> Network:
    """A.X K1: DeepSeek V3 with a norm after the experts."""
    return _latent(c, architecture, layered(c, lambda c: shared_and_routed(c, norm=RMSNorm(c.integer("hidden_size")))))


def youtu(c: Config, architecture: str | None) -> Network:
    """Youtu-LLM: DeepSeek V3's attention, and Llama's MLP in every layer."""
    return _latent(c, architecture, gated_mlp(c))


def mistral4(c: Config, architecture: str | None) -> Network:
    """Mistral 4: softmax scores choose the experts, and queries grow with the position."""
    if c.section("rope_parameters") and c.section("rope_parameters").get("llama_4_scaling_beta") is None:
        raise ConfigError(f"{c.where} has no 'llama_4_scaling_beta' in 'rope_parameters', which mistral4 needs.")

    def mixture(c: Config) -> Module:
        gate = SoftmaxLimitedRouter(
            c.integer("hidden_size"),
            c.integer("n_routed_experts"),
            c.within("num_experts_per_tok", "n_routed_experts"),
            groups=c.divides("n_group", "n_routed_experts"),
            top_groups=c.within("topk_group", "n_group"),
            normalise=c.flag("norm_topk_prob"),
        )
        return _with_shared(c, gate)

    return _latent(c, architecture, layered(c, mixture), query_scaling=scaled_by_position)


def _latent(
    c: Config,
    architecture: str | None,
    mlp: Callable[[], Module] | list[Callable[[], Module]],
    query_scaling: Callable[[Tensor], Tensor] | None = None,
) -> Network:
    rotate = rotate_interleaved if c.flag("rope_interleave", True) else apply_rotary
    return dense_decoder(
        c,
        architecture,
        make_attention=lambda _: latent_attention(c, rotate, query_scaling),
        mlp=mlp,
        rotary=RotaryEmbedding(c.integer("qk_rope_head_dim")),
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
        "axk1",
        axk1,
        V3
        | sizes(
            (163840, 7168, 18432, 61, 64, 64, 32768),
            moe_intermediate_size=2048,
            n_routed_experts=192,
            first_k_dense_replace=1,
        ),
        _ALIASES,
        kinds="decoder with latent attention, experts",
    ),
    Family(
        "sarvam_mla",
        deepseek_v3,
        V3
        | sizes(
            (262144, 4096, 16384, 32, 64, 0, 0),
            n_routed_experts=128,
            q_lora_rank=None,
            n_group=1,
            topk_group=1,
            first_k_dense_replace=1,
        ),
        _ALIASES | {"num_experts": "n_routed_experts", "num_shared_experts": "n_shared_experts"},
        kinds="decoder with latent attention, experts",
    ),
    Family(
        "youtu",
        youtu,
        V3 | llama_sizes((128256, 2048, 6144, 32, 16, 0, 131072), tie_word_embeddings=True),
        kinds="decoder with latent attention",
    ),
    Family(
        "mistral4",
        mistral4,
        V3
        | sizes(
            (131072, 4096, 12288, 36, 32, 0, 1048576),
            n_routed_experts=128,
            num_experts_per_tok=4,
            n_group=1,
            topk_group=1,
            first_k_dense_replace=0,
            q_lora_rank=1024,
            kv_lora_rank=256,
            qk_nope_head_dim=64,
            pad_token_id=11,
        ),
        _ALIASES,
        kinds="decoder with latent attention, experts",
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
            attention_dropout=0.0,
        ),
        {"num_experts": "n_routed_experts"},
        kinds="decoder with latent attention, experts",
    ),
    Family(
        "glm4_moe_lite",
        deepseek_v3,
        V3
        | sizes(
            (154880, 2048, 10240, 47, 20, 0, 0),
            moe_intermediate_size=1536,
            n_routed_experts=64,
            num_experts_per_tok=4,
            n_group=1,
            topk_group=1,
            first_k_dense_replace=1,
            q_lora_rank=768,
            qk_nope_head_dim=192,
            v_head_dim=256,
        ),
        _ALIASES,
        kinds="decoder with latent attention, experts",
        verified="measured rows",
    ),
)
