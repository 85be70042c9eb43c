"""DeepSeek and its kin: shared and routed experts behind a few dense layers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from memcalc.model.config import Config
from memcalc.model.decoders import dense_decoder, gated_mlp
from memcalc.model.families import Family
from memcalc.model.module import Module
from memcalc.model.network import Network
from memcalc.model.sublayers.experts import Experts, SharedAndRoutedExperts, swiglu
from memcalc.model.sublayers.latent_attention import LatentAttention, rotate_interleaved
from memcalc.model.sublayers.mlp import GatedMLP, activation
from memcalc.model.sublayers.rotary import RotaryEmbedding, apply_rotary
from memcalc.model.sublayers.routers import GroupLimitedRouter


def latent_attention(c: Config) -> LatentAttention:
    """The latent attention of a DeepSeek config."""
    return LatentAttention(
        c.integer("hidden_size"), c.integer("num_attention_heads"), q_rank=c.optional("q_lora_rank"),
        kv_rank=c.integer("kv_lora_rank"), nope_dim=c.integer("qk_nope_head_dim"), rope_dim=c.integer("qk_rope_head_dim"),
        value_dim=c.integer("v_head_dim"), bias=c.flag("attention_bias"), dropout=c.probability("attention_dropout"),
        rotate=rotate_interleaved if c.flag("rope_interleave", True) else apply_rotary,
    )  # fmt: skip


def shared_and_routed(c: Config) -> SharedAndRoutedExperts:
    """Experts under a group-limited router, and shared ones."""
    hidden, width = c.integer("hidden_size"), c.integer("moe_intermediate_size")
    count, per_token = c.integer("n_routed_experts"), c.integer("num_experts_per_tok")
    act = c.text("hidden_act")
    gate = GroupLimitedRouter(
        hidden, count, per_token, groups=c.integer("n_group"), top_groups=c.integer("topk_group"),
        normalise=c.flag("norm_topk_prob"),
    )  # fmt: skip
    experts = Experts(hidden, width, count, per_token, swiglu(activation(act)))
    return SharedAndRoutedExperts(experts, gate, GatedMLP(hidden, width * c.integer("n_shared_experts"), act))


def deepseek_v3(c: Config, architecture: str | None) -> Network:
    """DeepSeek V3 and R1, Kimi K2, Moonlight: latent attention, dense first layers, then experts."""
    return dense_decoder(
        c, architecture, attend=lambda _: latent_attention(c), mlp=_mlps(c),
        rotary=RotaryEmbedding(c.integer("qk_rope_head_dim")),
    )  # fmt: skip


def _mlps(c: Config) -> list[Callable[[], Module]]:
    """A dense MLP in the first layers, shared and routed experts in the others."""
    dense, mlp = c.integer("first_k_dense_replace", minimum=0), gated_mlp(c)
    mixture = partial(shared_and_routed, c)
    return [mlp if layer < dense else mixture for layer in range(c.integer("num_hidden_layers"))]


FAMILIES = {
    "deepseek_v3": Family("deepseek_v3", deepseek_v3, {
        "vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048,
        "num_hidden_layers": 61, "num_attention_heads": 128, "n_shared_experts": 1, "n_routed_experts": 256,
        "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "norm_topk_prob": True, "first_k_dense_replace": 3,
        "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "hidden_act": "silu", "rope_interleave": True, "attention_bias": False, "attention_dropout": 0.0,
        "tie_word_embeddings": False,
    }, {"num_local_experts": "n_routed_experts"}, verified="measured rows, exact counts"),
}  # fmt: skip
