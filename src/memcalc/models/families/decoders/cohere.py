"""Cohere's Command: attention and MLP side by side, LayerNorm written out in fp32, rotation by pairs."""

from __future__ import annotations

from typing import Any

from memcalc import ops
from memcalc.config.reader import Config
from memcalc.models.common.decoder import by_type, dense_decoder
from memcalc.models.registry import Family
from memcalc.nn.layers.decoder_blocks import ParallelBlock
from memcalc.nn.layers.grouped_query_attention import HeadNorm
from memcalc.nn.layers.norms import EagerLayerNorm
from memcalc.nn.layers.rotary import RotaryEmbedding
from memcalc.nn.layers.rotary_interleaved import rotary_pairs_fp32
from memcalc.nn.model import Network


def _command(c: Config, architecture: str | None, attention: dict[str, Any], **rest: Any) -> Network:
    bias = c.flag("attention_bias")
    return dense_decoder(
        c,
        architecture,
        attention={"bias": bias, "out_bias": bias, "rotate": rotary_pairs_fp32, **attention},
        norm=EagerLayerNorm,
        block=ParallelBlock,
        rotary=RotaryEmbedding(c.head_dim(), pairs=True),
        bend=(ops.mul_scalar,),
        **rest,
    )


def cohere(c: Config, architecture: str | None) -> Network:
    """Command R and R+, Aya 23: R+ has a norm on query and key with a weight for each head."""
    norm = HeadNorm(EagerLayerNorm, "later") if c.flag("use_qk_norm") else None
    return _command(c, architecture, {"head_norm": norm})


def cohere2(c: Config, architecture: str | None) -> Network:
    """Command R7B and A: three layers with sliding window and rotation, then one with neither."""
    windows = by_type(c, c.integer("sliding_window_pattern"))
    turned = [window is not None for window in windows]
    return _command(c, architecture, {}, windows=windows, masks=[None, c.optional("sliding_window")], turned=turned)


_ROWS = "measured rows, exact counts"
FAMILIES = {
    "cohere": Family(
        "cohere",
        cohere,
        {
            "vocab_size": 256000,
            "hidden_size": 8192,
            "intermediate_size": 22528,
            "num_hidden_layers": 40,
            "num_attention_heads": 64,
            "hidden_act": "silu",
            "max_position_embeddings": 8192,
            "pad_token_id": 0,
            "tie_word_embeddings": True,
        },
        verified=_ROWS,
    ),
    "cohere2": Family(
        "cohere2",
        cohere2,
        {
            "vocab_size": 256000,
            "hidden_size": 8192,
            "intermediate_size": 22528,
            "num_hidden_layers": 40,
            "num_attention_heads": 64,
            "hidden_act": "silu",
            "max_position_embeddings": 8192,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
            "pad_token_id": 0,
            "tie_word_embeddings": True,
        },
        verified=_ROWS,
    ),
}
