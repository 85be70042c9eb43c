"""OpenELM, whose code is not part of Transformers: layers that differ in heads and width, from lists in the config."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from memcalc.config.reader import Config
from memcalc.errors import ConfigError
from memcalc.models.common.decoder import dense_decoder
from memcalc.models.family import Family, table
from memcalc.nn.layers.grouped_query_attention import GroupedQueryAttention, QKNorm
from memcalc.nn.layers.mlp import FusedGatedMLP
from memcalc.nn.layers.norms import RMSNorm
from memcalc.nn.model import Network
from memcalc.nn.module import Module


def _per_layer(c: Config, key: str) -> Sequence[int | float]:
    """A number for each layer."""
    depth, values = c.integer("num_hidden_layers"), c.items(key) or []
    found = [value for value in values if isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0]
    if len(found) != depth or len(values) != depth:
        raise ConfigError(f"{c.where} needs a positive number in {key!r} for each of its {depth} layers; correct it.")
    return found


def _width(c: Config, multiplier: float) -> int:
    """The width of an MLP: a multiple of the divisor that is not smaller than nine tenths of what was asked for."""
    asked, divisor = multiplier * c.integer("hidden_size"), c.integer("ffn_dim_divisor")
    width = max(divisor, int(asked + divisor / 2) // divisor * divisor)
    return width + divisor if width < 0.9 * asked else width


def openelm(c: Config, architecture: str | None) -> Network:
    """OpenELM 270M to 3B: query, key and value in one projection, a norm over each head's query and key."""
    hidden, head_dim = c.integer("hidden_size"), c.integer("head_dim")
    heads, kv_heads = _per_layer(c, "num_query_heads"), _per_layer(c, "num_kv_heads")
    norm = QKNorm(lambda _heads, dim: RMSNorm(dim), "after_transpose") if c.flag("normalize_qk_projections") else False

    def attend(layer: int) -> Module:
        return GroupedQueryAttention(
            hidden, int(heads[layer]), int(kv_heads[layer]), head_dim, fused=True, qk_norm=norm
        )

    act = c.text("activation_fn_name")
    if c.has("intermediate_size"):  # as GGUF files have it
        widths = [int(width) for width in _per_layer(c, "intermediate_size")]
    else:
        widths = [_width(c, multiplier) for multiplier in _per_layer(c, "ffn_multipliers")]
    mlps: list[Callable[[], Module]] = [partial(FusedGatedMLP, hidden, width, act) for width in widths]
    return dense_decoder(c, architecture, make_attention=attend, mlp=mlps)


FAMILIES = table(
    Family(
        "openelm",
        openelm,
        {
            "vocab_size": 32000,
            "hidden_size": 1280,
            "num_hidden_layers": 16,
            "head_dim": 64,
            "ffn_dim_divisor": 256,
            "max_position_embeddings": 2048,
            "activation_fn_name": "swish",
            "normalize_qk_projections": True,
            "tie_word_embeddings": True,
        },
        {
            "model_dim": "hidden_size",
            "num_transformer_layers": "num_hidden_layers",
            "max_context_length": "max_position_embeddings",
            "share_input_output_layers": "tie_word_embeddings",
            "num_attention_heads": "num_query_heads",
            "num_key_value_heads": "num_kv_heads",
        },
        verified="exact counts; tensors as Transformers' llama and phi3 keep them",
    )
)
