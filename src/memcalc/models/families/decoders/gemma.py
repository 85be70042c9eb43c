"""Gemma 1 to 3 (text): scaled embeddings, norms whose weight is added to one, from 2 on norms around every sublayer."""

from __future__ import annotations

from functools import partial
from typing import Any

from memcalc.config.reader import Config
from memcalc.errors import ConfigError
from memcalc.models.common.decoder import (
    SOFT_CAP,
    biases,
    dense_decoder,
    gated_mlp,
    sorted_windows,
    windows_by_layer_type,
)
from memcalc.models.family import Family, llama_sizes, sizes, table
from memcalc.nn.layers.decoder_blocks import PRE_AND_POST_NORM, DecoderBlock, NormNames
from memcalc.nn.layers.grouped_query_attention import QKNorm
from memcalc.nn.layers.linear import ScaledEmbedding
from memcalc.nn.layers.norms import GemmaRMSNorm
from memcalc.nn.layers.rotary import RotaryByWindow, RotaryEmbedding
from memcalc.nn.model import Network


def _gemma(c: Config, architecture: str | None, act: str, attention: dict[str, Any], **rest: Any) -> Network:
    if c.flag("use_bidirectional_attention"):
        raise ConfigError(f"{c.where} has 'use_bidirectional_attention', which memcalc does not describe; remove it.")
    return dense_decoder(
        c,
        architecture,
        attention={**biases(c), **attention},
        mlp=gated_mlp(c, act),
        norm=GemmaRMSNorm,
        embedding=ScaledEmbedding,
        logit_transforms=SOFT_CAP if c.has("final_logit_softcapping") else (),
        **rest,
    )


def gemma(c: Config, architecture: str | None) -> Network:
    """Gemma 1: Llama's blocks."""
    return _gemma(c, architecture, "hidden_act", {})


def gemma2(c: Config, architecture: str | None, names: NormNames = PRE_AND_POST_NORM) -> Network:
    """Gemma 2: every other layer has the sliding window; soft caps on the logits and on eager attention's scores."""
    return _gemma(
        c,
        architecture,
        "hidden_activation",
        {"attn_logit_softcapping": c.has("attn_logit_softcapping")},
        windows=windows_by_layer_type(c, 2),
        masks=[None, c.optional("sliding_window")],
        block=partial(DecoderBlock, names=names),
    )


def vaultgemma(c: Config, architecture: str | None) -> Network:
    """VaultGemma: Gemma 2 with norms in front of the sublayers only."""
    return gemma2(c, architecture, ("input_layernorm", None, "pre_feedforward_layernorm", None))


def gemma3_text(c: Config, architecture: str | None) -> Network:
    """Gemma 3: norms on query and key; layers with the sliding window have a rotary embedding of their own."""
    windows = windows_by_layer_type(c, c.integer("sliding_window_pattern"))
    head_dim = c.head_dim()
    return _gemma(
        c,
        architecture,
        "hidden_activation",
        {"qk_norm": QKNorm(lambda _heads, dim: GemmaRMSNorm(dim), "after_transpose")},
        windows=windows,
        masks=[None, c.optional("sliding_window")],
        block=partial(DecoderBlock, names=PRE_AND_POST_NORM),
        rotary=RotaryByWindow(sorted_windows(windows), lambda: RotaryEmbedding(head_dim)),
    )


_GEMMA2 = sizes(
    (256000, 2304, 9216, 26, 8, 4, 8192),
    head_dim=256,
    hidden_activation="gelu_pytorch_tanh",
    sliding_window=4096,
    final_logit_softcapping=30.0,
    attn_logit_softcapping=50.0,
    pad_token_id=0,
    tie_word_embeddings=True,
)
FAMILIES = table(
    Family(
        "gemma",
        gemma,
        llama_sizes(
            (256000, 3072, 24576, 28, 16, 16, 8192),
            head_dim=256,
            hidden_act="gelu_pytorch_tanh",
            pad_token_id=0,
            tie_word_embeddings=True,
        ),
    ),
    Family("gemma2", gemma2, _GEMMA2, attention="eager, flash"),
    Family("vaultgemma", vaultgemma, _GEMMA2, attention="eager, flash", verified="measured rows"),
    Family(
        "gemma3_text",
        gemma3_text,
        sizes(
            (262208, 2304, 9216, 26, 8, 4, 131072),
            head_dim=256,
            hidden_activation="gelu_pytorch_tanh",
            sliding_window=4096,
            sliding_window_pattern=6,
            pad_token_id=0,
            tie_word_embeddings=True,
        ),
    ),
)
