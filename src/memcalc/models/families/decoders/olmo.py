"""OLMo 1 to 3: rotary embedding in fp32; norms without weights in the first, after the sublayers since the second."""

from __future__ import annotations

from functools import partial
from typing import Any

from memcalc.config.reader import Config
from memcalc.models.common.decoder import biases, dense_decoder, sorted_windows, windows_by_layer_type
from memcalc.models.family import Family, llama_sizes, table
from memcalc.nn.layers.decoder_blocks import POST_NORM, DecoderBlock
from memcalc.nn.layers.grouped_query_attention import QKNorm
from memcalc.nn.layers.norms import PlainLayerNorm, RMSNorm
from memcalc.nn.layers.rotary import RotaryByWindow, RotaryEmbedding, rotary_cast_back
from memcalc.nn.model import Network

_NORM = partial(RMSNorm, scale_in="mixed")


def olmo(c: Config, architecture: str | None) -> Network:
    """OLMo 1: LayerNorm without weight and bias; queries, keys and values may be clipped."""
    return dense_decoder(
        c,
        architecture,
        attention={**biases(c), "rotate": rotary_cast_back, "clip_qkv": c.has("clip_qkv")},
        norm=lambda _width: PlainLayerNorm(),
        rotary=RotaryEmbedding(c.head_dim(), fp32=True),
    )


def _post_normed(c: Config, architecture: str | None, **rest: Any) -> Network:
    """Norms after attention and MLP, and over all heads of query and key."""
    norm = QKNorm(lambda heads, dim: _NORM(heads * dim), "projection")
    return dense_decoder(
        c,
        architecture,
        attention={**biases(c), "rotate": rotary_cast_back, "qk_norm": norm},
        norm=_NORM,
        block=partial(DecoderBlock, names=POST_NORM),
        **rest,
    )


def olmo2(c: Config, architecture: str | None) -> Network:
    """OLMo 2."""
    return _post_normed(c, architecture, rotary=RotaryEmbedding(c.head_dim(), fp32=True))


def olmo3(c: Config, architecture: str | None) -> Network:
    """OLMo 3: three layers with the sliding window, then one without; a rotary embedding for either."""
    windows, head_dim = windows_by_layer_type(c, 4), c.head_dim()
    tables = RotaryByWindow(sorted_windows(windows), lambda: RotaryEmbedding(head_dim, fp32=True))
    return _post_normed(c, architecture, windows=windows, masks=[None, c.optional("sliding_window")], rotary=tables)


FAMILIES = table(
    Family("olmo", olmo, llama_sizes((50304, 4096, 11008, 32, 32, 0, 2048), pad_token_id=1)),
    Family("olmo2", olmo2, llama_sizes((50304, 4096, 11008, 32, 32, 0, 2048), pad_token_id=1)),
    Family("olmo3", olmo3, llama_sizes((50304, 4096, 11008, 32, 32, 0, 2048), sliding_window=4096, pad_token_id=1)),
)
