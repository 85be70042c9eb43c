"""Cohere's Command: attention and MLP side by side, LayerNorm written out in fp32, rotation by pairs."""

from __future__ import annotations

from typing import Any

from memcalc import ops
from memcalc.config.reader import Config
from memcalc.models.common.decoder import biases, dense_decoder, windows_from
from memcalc.models.family import Family, llama_sizes, table
from memcalc.nn.layers.decoder_blocks import ParallelBlock
from memcalc.nn.layers.grouped_query_attention import QKNorm
from memcalc.nn.layers.norms import EagerLayerNorm
from memcalc.nn.layers.rotary import RotaryEmbedding
from memcalc.nn.layers.rotary_interleaved import rotary_pairs_fp32
from memcalc.nn.model import Network


def command(c: Config, architecture: str | None, attention: dict[str, Any], **rest: Any) -> Network:
    """Blocks side by side, rotation by pairs and scaled logits; `rest` are keyword arguments of dense_decoder."""
    return dense_decoder(
        c,
        architecture,
        attention={**biases(c), "rotate": rotary_pairs_fp32, **attention},
        block=ParallelBlock,
        rotary=RotaryEmbedding(c.head_dim(), pairs=True),
        logit_transforms=(ops.mul_scalar,),
        **{"norm": EagerLayerNorm, **rest},
    )


def cohere(c: Config, architecture: str | None) -> Network:
    """Command R and R+, Aya 23: R+ has a norm on query and key with a weight for each head."""
    norm = QKNorm(EagerLayerNorm, "after_projections") if c.flag("use_qk_norm") else None
    return command(c, architecture, {"qk_norm": norm})


def cohere2_windows(c: Config, *, dense: int = 0, dense_pattern: int = 1) -> list[int | None]:
    """The window of each layer; every so many-th has none, counted anew after so many `dense` layers."""
    pattern, depth = c.integer("sliding_window_pattern"), c.integer("num_hidden_layers")
    slides = [(layer + 1) % dense_pattern != 0 for layer in range(dense)]
    slides += [(layer + 1) % pattern != 0 for layer in range(depth - dense)]
    return windows_from(c, slides, c.optional("sliding_window"))


def cohere2(c: Config, architecture: str | None) -> Network:
    """Command R7B and A: three layers with sliding window and rotation, then one with neither."""
    windows = cohere2_windows(c)
    rope_layers = [window is not None for window in windows]
    return command(
        c, architecture, {}, windows=windows, masks=[None, c.optional("sliding_window")], rope_layers=rope_layers
    )


FAMILIES = table(
    Family(
        "cohere", cohere, llama_sizes((256000, 8192, 22528, 40, 64, 0, 8192), pad_token_id=0, tie_word_embeddings=True)
    ),
    Family(
        "cohere2",
        cohere2,
        llama_sizes(
            (256000, 8192, 22528, 40, 64, 0, 8192),
            sliding_window=4096,
            sliding_window_pattern=4,
            pad_token_id=0,
            tie_word_embeddings=True,
        ),
    ),
)
