"""State-space models and hybrids of them with attention."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.config.reader import Config
from memcalc.errors import ConfigError
from memcalc.models.common.causal_lm import CausalLM, DecoderModel
from memcalc.models.common.decoder import biases, dense_decoder, gated_mlp
from memcalc.models.common.heads import decoder
from memcalc.models.family import Family, llama_sizes, table
from memcalc.nn.layers.decoder_blocks import DecoderBlock, MixerBlock
from memcalc.nn.layers.linear import Embedding
from memcalc.nn.layers.masks import RECURRENT
from memcalc.nn.layers.norms import RMSNorm
from memcalc.nn.layers.recurrent.mamba1 import MambaMixer, WeightlessNorm
from memcalc.nn.layers.recurrent.mamba2 import GatedRMSNorm, Mamba2Mixer, Mamba2Shape, mixer_of
from memcalc.nn.layers.rotary import RotaryEmbedding, rotary_of_part
from memcalc.nn.model import Network
from memcalc.nn.module import Module
from memcalc.nn.stack import Stack
from memcalc.tables.dtypes import FP32


def in_fp32(logits: Tensor) -> Tensor:
    """Logits that the head casts by itself, before the loss does."""
    return ops.to(logits, FP32)


def mamba2(c: Config, architecture: str | None) -> Network:
    """Mamba 2 and Codestral Mamba, without the `mamba_ssm` kernels."""
    hidden, bias = c.integer("hidden_size"), c.flag("use_bias")
    inner, all_heads = c.integer("expand") * hidden, c.integer("num_heads") * c.integer("head_dim")
    if inner != all_heads:
        raise ConfigError(
            f"{c.where} has 'expand' times 'hidden_size' {inner}, but 'num_heads' times 'head_dim' {all_heads}; they "
            "must be equal, correct one."
        )
    shape = Mamba2Shape(
        c.integer("num_heads"),
        c.integer("head_dim"),
        c.integer("state_size"),
        c.divides("n_groups", "num_heads"),
        c.integer("chunk_size"),
        c.integer("conv_kernel"),
    )

    def mixer() -> Module:
        return Mamba2Mixer(
            hidden,
            shape,
            c.text("hidden_act"),
            GatedRMSNorm(shape.inner, shape.groups),
            conv_bias=c.flag("use_conv_bias"),
            bias=bias,
            out_bias=bias,
        )

    return _recurrent(c, architecture, mixer)


def mamba(c: Config, architecture: str | None) -> Network:
    """Mamba, without the `mamba_ssm` kernels: a loop over tokens."""
    return _recurrent(c, architecture, partial(_mamba1, c))


def falcon_mamba(c: Config, architecture: str | None) -> Network:
    """Falcon Mamba: norms over steps, b and c."""
    widths = (_inner(c), c.integer("state_size"), c.integer("state_size"))

    def norms() -> list[Module]:
        return [WeightlessNorm(width) for width in widths]

    return _recurrent(c, architecture, partial(_mamba1, c, norms))


def _mamba1(c: Config, norms: Callable[[], list[Module]] | None = None) -> Module:
    hidden = c.integer("hidden_size")
    rank = -(-hidden // 16) if c.get("time_step_rank") in ("auto", None) else c.integer("time_step_rank")
    return MambaMixer(
        hidden,
        _inner(c),
        c.integer("state_size"),
        rank,
        c.integer("conv_kernel"),
        c.text("hidden_act"),
        conv_bias=c.flag("use_conv_bias"),
        bias=c.flag("use_bias"),
        norms=norms,
    )


def _inner(c: Config) -> int:
    """Width of the inner states: given, or so many times the hidden size."""
    return c.integer("intermediate_size", int(c.factor("expand") * c.integer("hidden_size")))


def _recurrent(c: Config, architecture: str | None, mixer: Callable[[], Module]) -> Network:
    """A model of nothing but mixers."""
    hidden, fp32 = c.integer("hidden_size"), c.flag("residual_in_fp32")
    embedding = Embedding(c.integer("vocab_size"), hidden)
    depth = c.integer("num_hidden_layers")
    layers = Stack(["mixer"] * depth, lambda _: MixerBlock(mixer(), RMSNorm(hidden), fp32=fp32))
    model = DecoderModel(embedding, layers, RMSNorm(hidden), None, [RECURRENT], position_ids="none")
    tied = c.flag("tie_word_embeddings")
    network = decoder(
        c, architecture, model, hidden, embedding, tied=tied, logit_transforms=[in_fp32], cast_to_head_dtype=True
    )
    network.accepts_past_key_values = False
    return network


def bamba(c: Config, architecture: str | None) -> Network:
    """Bamba: Mamba 2 mixers and a few layers of attention, of which half of each head is rotated."""
    attends = set(c.integers("attn_layer_indices"))
    recurrent = [layer not in attends for layer in range(c.integer("num_hidden_layers"))]
    network = dense_decoder(
        c,
        architecture,
        windows=[RECURRENT if kind else None for kind in recurrent],
        make_attention=lambda layer: mixer_of(c) if recurrent[layer] else None,
        mlp=gated_mlp(c, bias=c.flag("mlp_bias")),
        attention={**biases(c), "rotate": rotary_of_part},
        rotary=RotaryEmbedding(c.rotary_dim(c.head_dim(), 0.5)),
        block=partial(DecoderBlock, order="mlp norms self_attn", returns_weights=True),
    )
    if isinstance(network, CausalLM):
        network.z_loss = c.number("z_loss_coefficient", 0.0) > 0
    return network


_MAMBA: dict[str, object] = {
    "vocab_size": 50280,
    "hidden_size": 768,
    "state_size": 16,
    "num_hidden_layers": 32,
    "expand": 2,
    "conv_kernel": 4,
    "use_conv_bias": True,
    "hidden_act": "silu",
    "time_step_rank": "auto",
    "tie_word_embeddings": True,
}
FAMILIES = table(
    Family(
        "bamba",
        bamba,
        llama_sizes(
            (128000, 4096, 14336, 32, 32, 8, 0),
            attention_dropout=0.0,
            mamba_n_heads=128,
            mamba_d_head="auto",
            mamba_n_groups=1,
            mamba_d_state=256,
            mamba_d_conv=4,
            mamba_chunk_size=256,
            mamba_conv_bias=True,
            mamba_expand=2,
        ),
        kinds="Mamba 2, attention",
    ),
    Family("mamba", mamba, {**_MAMBA, "residual_in_fp32": True}, kinds="Mamba"),
    Family("falcon_mamba", falcon_mamba, {**_MAMBA, "residual_in_fp32": True}, kinds="Mamba"),
    Family(
        "mamba2",
        mamba2,
        {
            "vocab_size": 32768,
            "hidden_size": 4096,
            "num_hidden_layers": 64,
            "num_heads": 128,
            "head_dim": 64,
            "expand": 2,
            "state_size": 128,
            "n_groups": 8,
            "chunk_size": 256,
            "conv_kernel": 4,
            "use_conv_bias": True,
            "residual_in_fp32": True,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
        },
        kinds="Mamba 2",
        verified="measured rows",
    ),
)
