"""Llama and its closest relatives: RMSNorm before attention and MLP, rotary embedding, SwiGLU."""

from __future__ import annotations

from functools import partial

from memcalc.config.reader import Config
from memcalc.models.common.decoder import dense_decoder, llama_like, same_window, windows_from
from memcalc.models.family import Family, llama_sizes, table
from memcalc.nn.layers.grouped_query_attention import PER_HEAD
from memcalc.nn.model import Network


def qwen_windows(c: Config) -> list[int | None]:
    """Qwen's layers from `max_window_layers` on have the window, if it is switched on at all."""
    depth = c.integer("num_hidden_layers")
    window = c.optional("sliding_window") if c.flag("use_sliding_window") else None
    first = c.integer("max_window_layers", 28, minimum=0)
    return windows_from(c, [window is not None and layer >= first for layer in range(depth)], window)


llama = partial(llama_like, mlp_bias="mlp_bias")
"""Llama 1 to 3 and whatever else calls itself llama (Yi, SmolLM, ...)."""


def mistral(c: Config, architecture: str | None) -> Network:
    """Mistral 7B and its successors: Llama's layers, all with the sliding window where the config has one."""
    return dense_decoder(c, architecture, windows=same_window(c))


def qwen2(c: Config, architecture: str | None) -> Network:
    """Qwen 2 and 2.5: a bias on query, key and value."""
    windows = qwen_windows(c)
    return dense_decoder(c, architecture, windows=windows, masks=[None, *windows], attention={"bias": True})


def qwen3(c: Config, architecture: str | None) -> Network:
    """Qwen 3: a norm over each head's query and key."""
    windows = qwen_windows(c)
    return llama_like(c, architecture, windows=windows, masks=[None, *windows], attention={"qk_norm": PER_HEAD})


FAMILIES = table(
    Family("llama", llama, llama_sizes((32000, 4096, 11008, 32, 32, 0, 2048))),
    Family("mistral", mistral, llama_sizes((32000, 4096, 14336, 32, 32, 8, 131072), sliding_window=4096)),
    Family("qwen2", qwen2, llama_sizes((151936, 4096, 22016, 32, 32, 32, 32768), sliding_window=4096)),
    Family("qwen3", qwen3, llama_sizes((151936, 4096, 22016, 32, 32, 32, 32768), head_dim=128, sliding_window=4096)),
)
