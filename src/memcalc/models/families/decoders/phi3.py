"""Phi-3: Llama with one projection for query, key and value, and one for gate and up."""

from __future__ import annotations

from functools import partial

from memcalc.config.reader import Config
from memcalc.models.common.decoder import dense_decoder, same_window
from memcalc.models.family import Family, llama_sizes, table
from memcalc.nn.layers.decoder_blocks import DecoderBlock
from memcalc.nn.layers.mlp import FusedGatedMLP
from memcalc.nn.layers.rotary import RotaryEmbedding, rotary_head_of_each
from memcalc.nn.model import Network


def phi3(c: Config, architecture: str | None) -> Network:
    """Phi-3, Phi-3.5 and Phi-4 (text): part of each head rotated, dropout on what is added to the residual stream."""
    return dense_decoder(
        c,
        architecture,
        windows=same_window(c),
        attention={"fused": True, "rotate": rotary_head_of_each},
        mlp=lambda: FusedGatedMLP(c.integer("hidden_size"), c.integer("intermediate_size"), c.text("hidden_act")),
        block=partial(DecoderBlock, dropout=c.probability("resid_pdrop", 0.0)),
        rotary=RotaryEmbedding(c.rotary_dim(c.head_dim()), long=c.rope_type() in ("longrope", "su")),
    )


FAMILIES = table(Family("phi3", phi3, llama_sizes((32064, 3072, 8192, 32, 32, 0, 4096), pad_token_id=32000)))
