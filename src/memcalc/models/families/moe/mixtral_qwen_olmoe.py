"""Llama-like decoders with a mixture of experts in place of the MLP: Mixtral, Qwen's, OLMoE, Mellum."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from memcalc.config.reader import Config
from memcalc.models.common.decoder import (
    biases,
    dense_decoder,
    gated_mlp,
    same_window,
    sorted_windows,
    windows_by_layer_type,
    windows_from,
)
from memcalc.models.family import Family, llama_sizes, sizes, table
from memcalc.nn.layers.grouped_query_attention import QKNorm
from memcalc.nn.layers.linear import Linear
from memcalc.nn.layers.mixture_of_experts import Experts, MixtureOfExperts, clamped_swiglu, swiglu
from memcalc.nn.layers.mlp import GatedMLP, activation
from memcalc.nn.layers.norms import RMSNorm
from memcalc.nn.layers.rotary import RotaryByWindow, RotaryEmbedding, rotary_of_halves
from memcalc.nn.layers.routers import TopKRouter, TopKThenSoftmaxRouter
from memcalc.nn.model import Network
from memcalc.nn.module import Module


def _experts(c: Config, width: str, count: str) -> Experts:
    per_token = c.within("num_experts_per_tok", count)
    gate = swiglu(activation(c.text("hidden_act")))
    return Experts(c.integer("hidden_size"), c.integer(width), c.integer(count), per_token, gate)


def mixtral_mixture(c: Config) -> Callable[[], Module]:
    """What makes Mixtral's mixture of experts."""
    noisy = c.number("router_jitter_noise", 0.0) > 0

    def mixture() -> Module:
        experts = _experts(c, "intermediate_size", "num_local_experts")
        gate = TopKRouter(c.integer("hidden_size"), experts.count, experts.per_token, cast="not")
        return MixtureOfExperts(gate, experts, jitters=int(noisy))

    return mixture


def mixtral(c: Config, architecture: str | None) -> Network:
    """Mixtral."""
    return dense_decoder(c, architecture, windows=same_window(c), mlp=mixtral_mixture(c))


def qwen_mlps(c: Config, mixture: Callable[[], Module]) -> list[Callable[[], Module]]:
    """Which of Qwen's layers have experts: every `decoder_sparse_step`-th, but for those of `mlp_only_layers`."""
    step, dense = c.integer("decoder_sparse_step"), c.items("mlp_only_layers") or []
    mlp, depth = gated_mlp(c), c.integer("num_hidden_layers")
    return [mlp if layer in dense or (layer + 1) % step else mixture for layer in range(depth)]


def qwen3_mixture(c: Config, *, normalise: bool, count: str = "num_experts") -> Callable[[], Module]:
    """What makes Qwen 3's mixture of experts, of which the config key `count` says how many there are."""

    def mixture() -> Module:
        experts = _experts(c, "moe_intermediate_size", count)
        gate = TopKRouter(c.integer("hidden_size"), experts.count, experts.per_token, normalise=normalise)
        return MixtureOfExperts(gate, experts, gate_first=False)

    return mixture


def qwen3_moe(c: Config, architecture: str | None) -> Network:
    """Qwen 3 with experts: a norm over each head's query and key."""
    window = c.optional("sliding_window") if c.flag("use_sliding_window") else None
    windows = [window] * c.integer("num_hidden_layers")
    attention = {**biases(c), "qk_norm": True}
    mlps = qwen_mlps(c, qwen3_mixture(c, normalise=c.flag("norm_topk_prob")))
    return dense_decoder(c, architecture, windows=windows, mlp=mlps, attention=attention)


def mellum(c: Config, architecture: str | None) -> Network:
    """Mellum 2: Qwen 3 with experts, with windows and a rotary table for each kind of layer."""
    depth = c.integer("num_hidden_layers")
    mixture = qwen3_mixture(c, normalise=c.flag("norm_topk_prob"), count="num_local_experts")
    windows = windows_from(c, [False] * depth, c.optional("sliding_window"))
    types, dense = c.layer_types(["sparse"] * depth, "mlp_layer_types"), gated_mlp(c)
    return dense_decoder(
        c,
        architecture,
        windows=windows,
        mlp=[mixture if kind == "sparse" else dense for kind in types],
        attention={**biases(c), "qk_norm": True},
        rotary=RotaryByWindow(sorted_windows(windows), lambda: RotaryEmbedding(c.head_dim())),
    )


def qwen_shared_mixture(c: Config, *, normalise: bool) -> Callable[[], Module]:
    """What makes Qwen's mixture with a shared expert after a sigmoid gate."""
    hidden = c.integer("hidden_size")

    def mixture() -> Module:
        experts = _experts(c, "moe_intermediate_size", "num_experts")
        gate = TopKRouter(hidden, experts.count, experts.per_token, normalise=normalise)
        shared = GatedMLP(hidden, c.integer("shared_expert_intermediate_size"), c.text("hidden_act"))
        return MixtureOfExperts(gate, experts, shared, Linear(hidden, 1, group="experts"))

    return mixture


def qwen2_moe(c: Config, architecture: str | None) -> Network:
    """Qwen 1.5 and 2 with experts, one of them shared."""
    window = c.optional("sliding_window") if c.flag("use_sliding_window") else None
    first = c.integer("max_window_layers", 28, minimum=0)
    depth = c.integer("num_hidden_layers")
    sliding = ["sliding_attention" if window and i < first and (i + 1) % 2 else "full_attention" for i in range(depth)]
    types = c.layer_types(sliding)
    windows = [window if kind == "sliding_attention" else None for kind in types]
    attention = {"bias": c.flag("qkv_bias", True)}
    mlps = qwen_mlps(c, qwen_shared_mixture(c, normalise=c.flag("norm_topk_prob")))
    return dense_decoder(c, architecture, windows=windows, masks=[None, window or 0], mlp=mlps, attention=attention)


def olmoe(c: Config, architecture: str | None) -> Network:
    """OLMoE: a norm over the whole projections of query and key."""

    def mixture() -> Module:
        experts = _experts(c, "intermediate_size", "num_experts")
        gate = TopKRouter(
            c.integer("hidden_size"), experts.count, experts.per_token, normalise=c.flag("norm_topk_prob")
        )
        return MixtureOfExperts(gate, experts)

    attention = {
        **biases(c),
        "clip_qkv": c.has("clip_qkv"),
        "qk_norm": QKNorm(lambda heads, dim: RMSNorm(heads * dim), "projection"),
    }
    return dense_decoder(c, architecture, mlp=mixture, attention=attention)


def gpt_oss(c: Config, architecture: str | None) -> Network:
    """gpt-oss: biases everywhere, attention sinks, every other layer with a sliding window, clamped SwiGLU experts."""
    hidden, per_token = c.integer("hidden_size"), c.within("num_experts_per_tok", "num_local_experts")
    width, count = c.integer("intermediate_size"), c.integer("num_local_experts")

    def mixture() -> Module:
        experts = Experts(hidden, width, count, per_token, clamped_swiglu, bias=True, transposed=True)
        return MixtureOfExperts(
            TopKThenSoftmaxRouter(hidden, count, per_token, bias=True), experts, returns_weights=True
        )

    windows, window = windows_by_layer_type(c, 2), c.optional("sliding_window")
    return dense_decoder(
        c,
        architecture,
        windows=windows,
        masks=[None, window],
        mlp=mixture,
        norm=partial(RMSNorm, scale_in="mixed"),
        attention={**biases(c), "sinks": True, "rotate": rotary_of_halves},
        rotary=RotaryEmbedding(c.head_dim(), once=True),
    )


FAMILIES = table(
    Family(
        "mixtral",
        mixtral,
        llama_sizes(
            (32000, 4096, 14336, 32, 32, 8, 0), router_aux_loss_coef=0.001, num_local_experts=8, num_experts_per_tok=2
        ),
        {"num_experts": "num_local_experts"},
        kinds="decoder, experts",
    ),
    Family(
        "gpt_oss",
        gpt_oss,
        sizes(
            (201088, 2880, 2880, 36, 64, 8, 0),
            router_aux_loss_coef=0.001,
            head_dim=64,
            sliding_window=128,
            num_local_experts=128,
            num_experts_per_tok=4,
            attention_bias=True,
            attention_dropout=0.0,
            tie_word_embeddings=False,
        ),
        {"num_experts": "num_local_experts"},
        attention="eager, flash",
        kinds="decoder, experts",
    ),
    Family(
        "olmoe",
        olmoe,
        llama_sizes(
            (50304, 2048, 2048, 16, 16, 0, 0),
            router_aux_loss_coef=0.01,
            num_experts=64,
            num_experts_per_tok=8,
            attention_dropout=0.0,
            pad_token_id=1,
        ),
        {"num_local_experts": "num_experts"},
        kinds="decoder, experts",
    ),
    Family(
        "qwen2_moe",
        qwen2_moe,
        llama_sizes(
            (151936, 2048, 5632, 24, 16, 16, 0),
            router_aux_loss_coef=0.001,
            decoder_sparse_step=1,
            moe_intermediate_size=1408,
            shared_expert_intermediate_size=5632,
            num_experts_per_tok=4,
            num_experts=60,
            sliding_window=4096,
            qkv_bias=True,
            max_window_layers=28,
            attention_dropout=0.0,
        ),
        kinds="decoder, experts",
    ),
    Family(
        "qwen3_moe",
        qwen3_moe,
        llama_sizes(
            (151936, 2048, 6144, 24, 32, 4, 0),
            router_aux_loss_coef=0.001,
            decoder_sparse_step=1,
            moe_intermediate_size=768,
            num_experts_per_tok=8,
            num_experts=128,
            sliding_window=4096,
        ),
        {"num_local_experts": "num_experts"},
        kinds="decoder, experts",
    ),
    Family(
        "mellum",
        mellum,
        llama_sizes(
            (98304, 2304, 7168, 28, 32, 4, 131072),
            head_dim=128,
            router_aux_loss_coef=0.001,
            moe_intermediate_size=896,
            num_experts_per_tok=8,
            num_local_experts=64,
            norm_topk_prob=True,
            sliding_window=1024,
        ),
        {"num_experts": "num_local_experts"},
        kinds="decoder, experts",
    ),
)
