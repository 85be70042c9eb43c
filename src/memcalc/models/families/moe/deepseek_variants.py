"""DeepSeek's experts after another attention: GLM 4.5, dots.llm1, Solar Open, K-EXAONE, and DeepSeek's first."""

from __future__ import annotations

from functools import partial

from memcalc.config.reader import Config
from memcalc.models.common.decoder import biases, dense_decoder, windows_by_layer_type
from memcalc.models.families.decoders.llama_variants import pattern_length
from memcalc.models.families.moe.deepseek import layered, shared_and_routed, softmax_routed
from memcalc.models.family import Family, llama_sizes, table
from memcalc.nn.layers.grouped_query_attention import QKNorm
from memcalc.nn.layers.norms import RMSNorm
from memcalc.nn.layers.rotary import RotaryEmbedding, rotary_of_part
from memcalc.nn.model import Network


def glm4_moe(c: Config, architecture: str | None) -> Network:
    """GLM 4.5 and 4.6: DeepSeek's experts after grouped-query attention, of which a part of each head is rotated."""
    attention = {
        "bias": c.flag("attention_bias"),
        "rotate": rotary_of_part,
        "qk_norm": QKNorm(lambda _, dim: RMSNorm(dim), "after_projections") if c.flag("use_qk_norm") else False,
    }
    rotary = RotaryEmbedding(c.rotary_dim(c.head_dim(), 0.5))
    return dense_decoder(c, architecture, mlp=layered(c, shared_and_routed), attention=attention, rotary=rotary)


def dots1(c: Config, architecture: str | None) -> Network:
    """dots.llm1: DeepSeek's experts after Qwen 3's attention."""
    depth, window = c.integer("num_hidden_layers"), c.optional("sliding_window")
    first = c.integer("max_window_layers", minimum=0)
    types = c.layer_types(["sliding_attention" if window and i >= first else "full_attention" for i in range(depth)])
    windows = [window if kind == "sliding_attention" else None for kind in types]
    attention = {**biases(c), "qk_norm": True}
    return dense_decoder(c, architecture, windows=windows, mlp=layered(c, shared_and_routed), attention=attention)


def solar_open(c: Config, architecture: str | None) -> Network:
    """Solar Open: DeepSeek's experts in every layer, after Llama's attention."""
    attention = {"bias": c.flag("attention_bias")}
    return dense_decoder(c, architecture, mlp=partial(shared_and_routed, c), attention=attention)


def deepseek(c: Config, architecture: str | None) -> Network:
    """DeepSeekMoE 16B: softmax routing after Llama's attention."""
    return dense_decoder(c, architecture, mlp=layered(c, softmax_routed), attention=biases(c))


def exaone_moe(c: Config, architecture: str | None) -> Network:
    """K-EXAONE: DeepSeek's experts after EXAONE 4's attention, with norms before the sublayers."""
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


_ALIASES = {"num_local_experts": "n_routed_experts"}
_ONE_GROUP: dict[str, object] = {
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
}

FAMILIES = table(
    Family(
        "solar_open",
        solar_open,
        llama_sizes(
            (196608, 4096, 0, 48, 64, 8, 0),
            moe_intermediate_size=1280,
            head_dim=128,
            n_routed_experts=128,
            attention_dropout=0.0,
            **_ONE_GROUP,
        ),
        _ALIASES,
        kinds="decoder, experts",
        verified="measured rows",
    ),
    Family(
        "deepseek",
        deepseek,
        llama_sizes(
            (102400, 4096, 11008, 30, 32, 32, 2048),
            moe_intermediate_size=1407,
            topk_method="greedy",
            first_k_dense_replace=0,
            attention_dropout=0.0,
        ),
        kinds="decoder, experts",
        verified="exact counts; tensors as Transformers' deepseek_v2 and llama keep them",
        attention_assumed=True,
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
            pad_token_id=0,
            **_ONE_GROUP,
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
            n_routed_experts=128,
            first_k_dense_replace=1,
            attention_dropout=0.0,
            **_ONE_GROUP,
        ),
        _ALIASES,
        kinds="decoder, experts",
    ),
    Family(
        "sarvam_moe",
        glm4_moe,
        llama_sizes(
            (262144, 4096, 8192, 19, 64, 4, 0),
            head_dim=64,
            moe_intermediate_size=1024,
            n_routed_experts=128,
            first_k_dense_replace=1,
            attention_dropout=0.0,
            use_qk_norm=True,
            partial_rotary_factor=1.0,
            pad_token_id=0,
            **{**_ONE_GROUP, "num_experts_per_tok": 6},
        ),
        _ALIASES
        | {
            "num_experts": "n_routed_experts",
            "num_shared_experts": "n_shared_experts",
            "use_qkv_bias": "attention_bias",
        },
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
            attention_dropout=0.0,
            sliding_window=4096,
            max_window_layers=62,
        ),
        _ALIASES,
        kinds="decoder, experts",
    ),
)
