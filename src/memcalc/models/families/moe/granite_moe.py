"""Granite with experts, and Granite 4, in which most layers are Mamba 2 mixers."""

from __future__ import annotations

from functools import partial

from memcalc import ops
from memcalc.config.reader import Config
from memcalc.models.common.decoder import biases, dense_decoder
from memcalc.models.family import Family, llama_sizes, table
from memcalc.nn.layers.decoder_blocks import DecoderBlock
from memcalc.nn.layers.masks import RECURRENT
from memcalc.nn.layers.mixture_of_experts import Experts, ExpertsAndMLP, MixtureOfExperts, swiglu
from memcalc.nn.layers.mlp import FusedGatedMLP, activation
from memcalc.nn.layers.recurrent.mamba2 import mixer_of
from memcalc.nn.layers.routers import TopKThenSoftmaxRouter
from memcalc.nn.model import Network
from memcalc.nn.module import Module


def _mixture(c: Config) -> MixtureOfExperts:
    hidden, width = c.integer("hidden_size"), c.integer("intermediate_size")
    count, per_token = c.integer("num_local_experts"), c.within("num_experts_per_tok", "num_local_experts")
    experts = Experts(hidden, width, count, per_token, swiglu(activation(c.text("hidden_act"))))
    return MixtureOfExperts(TopKThenSoftmaxRouter(hidden, count, per_token, fp32=True), experts)


def granitemoe(c: Config, architecture: str | None) -> Network:
    """Granite 3 with experts: embeddings, residual branches and logits multiplied by numbers."""
    width = c.integer("shared_intermediate_size", 0, minimum=0)

    def feed_forward() -> Module:
        if not width:
            return _mixture(c)
        names = ("input_linear", "output_linear")
        shared = FusedGatedMLP(c.integer("hidden_size"), width, c.text("hidden_act"), names)
        return ExpertsAndMLP(_mixture(c), shared)

    return dense_decoder(
        c,
        architecture,
        mlp=feed_forward,
        attention=biases(c),
        block=partial(DecoderBlock, residual_multiplier=True, order="self_attn norms mlp"),
        logit_transforms=[ops.mul_scalar],
        embedding_multiplier=True,
    )


def granitemoehybrid(c: Config, architecture: str | None) -> Network:
    """Granite 4: Mamba 2 mixers and a few layers of attention, each before experts, an MLP, or both."""
    hidden, depth = c.integer("hidden_size"), c.integer("num_hidden_layers")
    types = c.layer_types(["linear_attention"] * depth)
    recurrent = [kind in ("linear_attention", "mamba") for kind in types]
    rotated = c.get("position_embedding_type") == "rope"
    width = c.integer("shared_intermediate_size")

    def feed_forward() -> Module:
        shared = FusedGatedMLP(hidden, width, c.text("hidden_act"), ("input_linear", "output_linear"))
        return ExpertsAndMLP(_mixture(c), shared) if c.integer("num_local_experts", minimum=0) else shared

    return dense_decoder(
        c,
        architecture,
        windows=[RECURRENT if kind else None for kind in recurrent],
        rope_layers=[rotated] * depth,
        make_attention=lambda layer: mixer_of(c) if recurrent[layer] else None,
        mlp=feed_forward,
        attention=biases(c),
        rotary=None if rotated else False,
        block=partial(DecoderBlock, residual_multiplier=True, order="norms mlp self_attn"),
        logit_transforms=[ops.mul_scalar],
        embedding_multiplier=True,
        position_ids="kept",
    )


_GRANITE: dict[str, object] = llama_sizes(
    (32000, 4096, 11008, 32, 32, 0, 0),
    attention_dropout=0.0,
    num_local_experts=8,
    num_experts_per_tok=2,
    router_aux_loss_coef=0.001,
)
FAMILIES = table(
    Family("granitemoe", granitemoe, _GRANITE, kinds="decoder, experts", verified="measured rows"),
    Family("granitemoeshared", granitemoe, _GRANITE | {"shared_intermediate_size": 0}, kinds="decoder, experts"),
    Family(
        "granitemoehybrid",
        granitemoehybrid,
        {
            **_GRANITE,
            "shared_intermediate_size": 1024,
            "mamba_n_heads": 128,
            "mamba_d_head": "auto",
            "mamba_n_groups": 1,
            "mamba_d_state": 256,
            "mamba_d_conv": 4,
            "mamba_chunk_size": 256,
            "mamba_conv_bias": True,
            "mamba_expand": 2,
        },
        {"layers_block_type": "layer_types"},
        kinds="Mamba 2, attention, experts",
    ),
)
