"""Configs of published decoders, by their shape numbers."""

from typing import Any


def decoder(hidden: int, layers: int, heads: int, kv_heads: int, width: int, vocab: int, **more: Any) -> dict[str, Any]:
    """The config of a Llama-like decoder."""
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": width,
        "vocab_size": vocab,
        **more,
    }
