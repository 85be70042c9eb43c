"""Llama-like decoders with a mixture of experts in place of the MLP: Mixtral, Qwen's, OLMoE."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from memcalc.model.config import Config
from memcalc.model.families import Family
from memcalc.model.sublayers.blocks import DecoderBlock
from memcalc.model.heads import decoder
from memcalc.model.module import Module, Stack
from memcalc.model.network import DecoderModel, Network
from memcalc.model.sublayers.attention import PER_HEAD, GroupedQueryAttention
from memcalc.model.sublayers.experts import Experts, MixtureOfExperts, swiglu
from memcalc.model.sublayers.linear import Embedding, Linear
from memcalc.model.sublayers.mlp import GatedMLP, activation
from memcalc.model.sublayers.norms import RMSNorm
from memcalc.model.sublayers.rotary import RotaryEmbedding
from memcalc.model.sublayers.routers import TopKRouter


def _decoder(
    c: Config, architecture: str | None, windows: list[int | None], mlps: list[Callable[[], Module]],
    **attention: Any,
) -> Network:  # fmt: skip
    """A causal LM whose layer i has the sliding window `windows[i]` and the MLP or mixture that `mlps[i]` makes."""
    hidden = c.integer("hidden_size")
    heads, kv_heads, head_dim = c.heads()

    def block(layer: int) -> Module:
        attend = GroupedQueryAttention(
            hidden, heads, kv_heads, head_dim, dropout=c.probability("attention_dropout", 0.0), window=windows[layer], **attention
        )
        return DecoderBlock(attend, mlps[layer](), lambda: RMSNorm(hidden))

    embedding = Embedding(c.integer("vocab_size"), hidden)
    kinds = list(zip(windows, mlps, strict=True))
    model = DecoderModel(embedding, Stack(kinds, block), RMSNorm(hidden), RotaryEmbedding(head_dim), set(windows))
    return decoder(c, architecture, model, hidden, embedding, tied=c.flag("tie_word_embeddings"))


def _experts(c: Config, width: str, count: str) -> Experts:
    per_token = c.integer("num_experts_per_tok")
    gate = swiglu(activation(c.text("hidden_act")))
    return Experts(c.integer("hidden_size"), c.integer(width), c.integer(count), per_token, gate)


def mixtral(c: Config, architecture: str | None) -> Network:
    """Mixtral 8x7B and 8x22B."""
    depth = c.integer("num_hidden_layers")

    def mixture() -> Module:
        experts = _experts(c, "intermediate_size", "num_local_experts")
        gate = TopKRouter(c.integer("hidden_size"), experts.count, experts.per_token, cast=False)
        return MixtureOfExperts(gate, experts)

    return _decoder(c, architecture, [c.optional("sliding_window")] * depth, [mixture] * depth)


def _qwen_mlps(c: Config, mixture: Callable[[], Module]) -> list[Callable[[], Module]]:
    """Which of Qwen's layers have experts: every `decoder_sparse_step`-th, but for those of `mlp_only_layers`."""
    step, dense = c.integer("decoder_sparse_step"), c.items("mlp_only_layers") or []

    def mlp() -> Module:
        return GatedMLP(c.integer("hidden_size"), c.integer("intermediate_size"), c.text("hidden_act"))

    depth = c.integer("num_hidden_layers")
    return [mlp if layer in dense or (layer + 1) % step else mixture for layer in range(depth)]


def qwen3_moe(c: Config, architecture: str | None) -> Network:
    """Qwen 3 with experts: a norm over each head's query and key."""

    def mixture() -> Module:
        experts = _experts(c, "moe_intermediate_size", "num_experts")
        gate = TopKRouter(
            c.integer("hidden_size"), experts.count, experts.per_token, normalise=c.flag("norm_topk_prob")
        )
        return MixtureOfExperts(gate, experts, gate_first=False)

    window = c.optional("sliding_window") if c.flag("use_sliding_window") else None
    bias = c.flag("attention_bias")
    windows = [window] * c.integer("num_hidden_layers")
    return _decoder(
        c, architecture, windows, _qwen_mlps(c, mixture), bias=bias, out_bias=bias, norm=PER_HEAD
    )


def qwen2_moe(c: Config, architecture: str | None) -> Network:
    """Qwen 1.5 and 2 with experts: a shared expert behind a sigmoid gate."""
    hidden = c.integer("hidden_size")

    def mixture() -> Module:
        experts = _experts(c, "moe_intermediate_size", "num_experts")
        gate = TopKRouter(hidden, experts.count, experts.per_token, normalise=c.flag("norm_topk_prob"))
        shared = GatedMLP(hidden, c.integer("shared_expert_intermediate_size"), c.text("hidden_act"))
        return MixtureOfExperts(gate, experts, shared, Linear(hidden, 1, group="experts"))

    window = c.optional("sliding_window") if c.flag("use_sliding_window") else None
    first = c.integer("max_window_layers", 28, minimum=0)
    depth = c.integer("num_hidden_layers")
    types = c.layer_types(["sliding_attention" if window and i < first else "full_attention" for i in range(depth)])
    windows = [window if kind == "sliding_attention" else None for kind in types]
    return _decoder(c, architecture, windows, _qwen_mlps(c, mixture), bias=c.flag("qkv_bias"))


_ROWS = "measured rows, exact counts"
FAMILIES = {
    "mixtral": Family("mixtral", mixtral, {
        "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_act": "silu", "num_local_experts": 8,
        "num_experts_per_tok": 2, "tie_word_embeddings": False,
    }, {"num_experts": "num_local_experts"}, verified=_ROWS),
    "qwen3_moe": Family("qwen3_moe", qwen3_moe, {
        "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 24,
        "num_attention_heads": 32, "num_key_value_heads": 4, "hidden_act": "silu", "decoder_sparse_step": 1,
        "moe_intermediate_size": 768, "num_experts_per_tok": 8, "num_experts": 128, "norm_topk_prob": False,
        "sliding_window": 4096, "attention_bias": False, "tie_word_embeddings": False,
    }, {"num_local_experts": "num_experts"}, verified=_ROWS),
}  # fmt: skip
