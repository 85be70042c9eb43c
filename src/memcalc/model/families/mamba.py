"""State-space models and hybrids of them with attention."""

from __future__ import annotations

from memcalc.model import ops
from memcalc.model.config import Config
from memcalc.model.families import Family
from memcalc.model.heads import decoder
from memcalc.model.module import Stack
from memcalc.model.network import DecoderModel, Network
from memcalc.model.sublayers.blocks import MixerBlock
from memcalc.model.sublayers.linear import Embedding
from memcalc.model.sublayers.mamba2 import GatedRMSNorm, Mamba2Mixer, Mamba2Shape
from memcalc.model.sublayers.masks import RECURRENT
from memcalc.model.sublayers.norms import RMSNorm
from memcalc.model.tensor import Tensor
from memcalc.tables.dtypes import FP32


def in_fp32(logits: Tensor) -> Tensor:
    """Logits that the head casts by itself, before the loss does."""
    return ops.to(logits, FP32)


def mamba2(c: Config, architecture: str | None) -> Network:
    """Mamba 2 and Codestral Mamba, without the `mamba_ssm` kernels."""
    hidden, depth = c.integer("hidden_size"), c.integer("num_hidden_layers")
    shape = Mamba2Shape(
        c.integer("num_heads"), c.integer("head_dim"), c.integer("state_size"), c.integer("n_groups"),
        c.integer("chunk_size"), c.integer("conv_kernel"),
    )  # fmt: skip
    bias, fp32 = c.flag("use_bias"), c.flag("residual_in_fp32")

    def block(_layer: int) -> MixerBlock:
        mixer = Mamba2Mixer(
            hidden, shape, c.text("hidden_act"), GatedRMSNorm(shape.inner, shape.groups),
            conv_bias=c.flag("use_conv_bias"), bias=bias, out_bias=bias,
        )  # fmt: skip
        return MixerBlock(mixer, RMSNorm(hidden), fp32=fp32)

    embedding = Embedding(c.integer("vocab_size"), hidden)
    model = DecoderModel(
        embedding, Stack(["mixer"] * depth, block), RMSNorm(hidden), None, [RECURRENT], positions="none"
    )
    tied = c.flag("tie_word_embeddings")
    network = decoder(c, architecture, model, hidden, embedding, tied=tied, bend=[in_fp32], cast=True)
    network.takes_past = False
    return network


_ROWS = "measured rows, exact counts"
FAMILIES = {
    "mamba2": Family("mamba2", mamba2, {
        "vocab_size": 32768, "hidden_size": 4096, "num_hidden_layers": 64, "num_heads": 128, "head_dim": 64,
        "state_size": 128, "n_groups": 8, "chunk_size": 256, "conv_kernel": 4, "use_bias": False, "use_conv_bias": True,
        "residual_in_fp32": True, "hidden_act": "silu", "tie_word_embeddings": False,
    }, verified=_ROWS),
}  # fmt: skip
