"""Llama and its closest kin: RMSNorm before attention and MLP, rotary embedding, SwiGLU."""

from __future__ import annotations

from memcalc.config.reader import Config
from memcalc.models.common.decoder import dense_decoder, gated_mlp, same_window, windows_from
from memcalc.models.registry import Family
from memcalc.nn.layers.grouped_query_attention import PER_HEAD
from memcalc.nn.model import Network


def qwen_windows(c: Config) -> list[int | None]:
    """Qwen's layers from `max_window_layers` on have the window, if it is switched on at all."""
    depth = c.integer("num_hidden_layers")
    window = c.optional("sliding_window") if c.flag("use_sliding_window") else None
    first = c.integer("max_window_layers", 28, minimum=0)
    return windows_from(c, [window is not None and layer >= first for layer in range(depth)], window)


def llama(c: Config, architecture: str | None) -> Network:
    """Llama 1 to 3 and whatever else calls itself llama (Yi, SmolLM, ...)."""
    bias = c.flag("attention_bias")
    mlp = gated_mlp(c, bias=c.flag("mlp_bias"))
    return dense_decoder(c, architecture, attention={"bias": bias, "out_bias": bias}, mlp=mlp)


def mistral(c: Config, architecture: str | None) -> Network:
    """Mistral 7B and its successors: Llama's layers, all with the sliding window where the config has one."""
    return dense_decoder(c, architecture, windows=same_window(c))


def qwen2(c: Config, architecture: str | None) -> Network:
    """Qwen 2 and 2.5: a bias on query, key and value."""
    windows = qwen_windows(c)
    return dense_decoder(c, architecture, windows=windows, masks=[None, *windows], attention={"bias": True})


def qwen3(c: Config, architecture: str | None) -> Network:
    """Qwen 3: a norm over each head's query and key."""
    bias = c.flag("attention_bias")
    attention = {"bias": bias, "out_bias": bias, "qk_norm": PER_HEAD}
    windows = qwen_windows(c)
    return dense_decoder(c, architecture, windows=windows, masks=[None, *windows], attention=attention)


_ROWS = "measured rows, exact counts"
FAMILIES = {
    "llama": Family(
        "llama",
        llama,
        {
            "vocab_size": 32000,
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "hidden_act": "silu",
            "max_position_embeddings": 2048,
            "tie_word_embeddings": False,
        },
        verified=_ROWS,
    ),
    "mistral": Family(
        "mistral",
        mistral,
        {
            "vocab_size": 32000,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "hidden_act": "silu",
            "max_position_embeddings": 131072,
            "sliding_window": 4096,
            "tie_word_embeddings": False,
        },
        verified=_ROWS,
    ),
    "qwen2": Family(
        "qwen2",
        qwen2,
        {
            "vocab_size": 151936,
            "hidden_size": 4096,
            "intermediate_size": 22016,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "hidden_act": "silu",
            "max_position_embeddings": 32768,
            "sliding_window": 4096,
            "tie_word_embeddings": False,
        },
        verified=_ROWS,
    ),
    "qwen3": Family(
        "qwen3",
        qwen3,
        {
            "vocab_size": 151936,
            "hidden_size": 4096,
            "intermediate_size": 22016,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "head_dim": 128,
            "hidden_act": "silu",
            "max_position_embeddings": 32768,
            "sliding_window": 4096,
            "tie_word_embeddings": False,
        },
        verified=_ROWS,
    ),
}
