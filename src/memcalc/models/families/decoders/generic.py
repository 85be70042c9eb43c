"""A decoder of a family that nobody described, for `--generic`: Llama's blocks, each with sizes of its own.

The config is not Transformers' but what `sources/generic` makes of one: lists with an entry for each layer.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from memcalc.config.reader import Config
from memcalc.models.common.decoder import dense_decoder
from memcalc.models.family import Family
from memcalc.nn.layers.grouped_query_attention import PER_HEAD, GroupedQueryAttention
from memcalc.nn.layers.mixture_of_experts import Experts, MixtureOfExperts, swiglu
from memcalc.nn.layers.mlp import GatedMLP, activation
from memcalc.nn.layers.routers import TopKRouter
from memcalc.nn.model import Network
from memcalc.nn.module import Module

GENERIC = "memcalc-generic-decoder"
"""Its model_type; no config.json of a model has it."""


def generic_decoder(c: Config, architecture: str | None) -> Network:
    """Attention by groups of heads and a gated MLP or experts, as the lists of each layer say."""
    hidden = c.integer("hidden_size")
    windows = [window or None for window in c.integers("layer_windows")]
    shapes = list(zip(*(c.integers(key) for key in _PER_LAYER), strict=True))
    normed = c.flag("head_norm")

    def attend(layer: int) -> Module:
        heads, kv_heads, head_dim = shapes[layer]
        rotated = head_dim == c.head_dim()  # the others' rotation is left out: one table of angles is kept
        options: dict[str, Any] = {} if rotated else {"rotate": None}
        return GroupedQueryAttention(
            hidden,
            heads,
            kv_heads,
            head_dim,
            window=windows[layer],
            bias=c.flag("attention_bias"),
            qk_norm=PER_HEAD if normed else False,
            **options,
        )

    layers = list(zip(shapes, c.integers("layer_widths"), c.integers("layer_experts"), strict=True))
    mlps = {  # one for each kind of layer, as layers with the same are taken for equal
        key: partial(_experts, c) if key[2] else partial(GatedMLP, hidden, key[1], c.text("hidden_act"))
        for key in dict.fromkeys(layers)
    }
    return dense_decoder(
        c,
        architecture,
        windows=windows,
        rope_layers=[shape[2] == c.head_dim() for shape in shapes],
        make_attention=attend,
        mlp=[mlps[key] for key in layers],
    )


def _experts(c: Config) -> Module:
    hidden, count = c.integer("hidden_size"), c.integer("num_experts")
    per_token = c.within("num_experts_per_tok", "num_experts")
    experts = Experts(hidden, c.integer("moe_intermediate_size"), count, per_token, swiglu(activation("silu")))
    width = c.integer("shared_intermediate_size", minimum=0)
    shared = GatedMLP(hidden, width, "silu") if width else None
    return MixtureOfExperts(TopKRouter(hidden, count, per_token, normalise=True), experts, shared)


_PER_LAYER = ("layer_heads", "layer_kv_heads", "layer_head_dims")

FAMILIES = {
    GENERIC: Family(
        GENERIC,
        generic_decoder,
        {"hidden_act": "silu", "tie_word_embeddings": False, "shared_intermediate_size": 0, "num_experts_per_tok": 2},
        kinds="decoder, layers of their own sizes",
        verified="only for --generic",
    )
}
