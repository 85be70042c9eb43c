"""Decoders with rotary embedding and torch's LayerNorm: StarCoder 2, StableLM, Nemotron."""

from __future__ import annotations

from functools import partial

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.config.reader import Config
from memcalc.models.common.decoder import biases, dense_decoder, same_window
from memcalc.models.family import Family, llama_sizes, table
from memcalc.nn.layers.decoder_blocks import DecoderBlock, ParallelBlock
from memcalc.nn.layers.grouped_query_attention import QKNorm
from memcalc.nn.layers.mlp import PlainMLP
from memcalc.nn.layers.norms import LayerNorm, LayerNormPerHead, ShiftedLayerNorm
from memcalc.nn.layers.rotary import RotaryEmbedding, Rotation, rotary_held, rotary_then_rest
from memcalc.nn.model import Network
from memcalc.nn.module import Module


def _plain(c: Config, *, bias: bool, dropout: float = 0.0, names: tuple[str, str] = ("up_proj", "down_proj")) -> Module:
    hidden, width = c.integer("hidden_size"), c.integer("intermediate_size")
    return PlainMLP(hidden, width, c.text("hidden_act"), names=names, bias=bias, dropout=dropout)


def starcoder2(c: Config, architecture: str | None) -> Network:
    """StarCoder 2: biases and dropout everywhere, an MLP without gate."""
    bias, dropout = c.flag("use_bias"), c.probability("residual_dropout", 0.0)
    return dense_decoder(
        c,
        architecture,
        windows=same_window(c),
        attention={**biases(c, "use_bias"), "out_dropout": dropout},
        mlp=lambda: _plain(c, bias=bias, dropout=dropout, names=("c_fc", "c_proj")),
        norm=LayerNorm,
        dropout=c.probability("embedding_dropout", 0.0),
    )


class StableLmBlock(DecoderBlock):
    """A block that keeps what it gave to attention bound until its end."""

    input_layernorm: Module
    post_attention_layernorm: Module

    def forward(self, hidden: Tensor, rotation: Rotation, mask: Tensor | None, position_ids: Tensor) -> Tensor:
        """[b, s, h] to [b, s, h]."""
        residual = hidden
        hidden = self.input_layernorm(hidden)
        attended, _weights = self.self_attn(hidden, rotation, mask)
        residual = ops.add(residual, attended)
        fed = self.mlp(self.post_attention_layernorm(residual))
        fed = ops.dropout(fed, self.dropout)
        return ops.add(residual, fed)


def stablelm(c: Config, architecture: str | None) -> Network:
    """StableLM: part of each head rotated; the larger ones have a norm per head, or attention and MLP side by side."""
    norm = (
        QKNorm(LayerNormPerHead, "after_transpose", ("q_layernorm", "k_layernorm")) if c.flag("qk_layernorm") else None
    )
    block = ParallelBlock if c.flag("use_parallel_residual") else StableLmBlock
    return dense_decoder(
        c,
        architecture,
        attention={"bias": c.flag("use_qkv_bias"), "qk_norm": norm, "rotate": rotary_held},
        norm=LayerNorm,
        block=partial(block, dropout=c.probability("hidden_dropout", 0.0)),
        rotary=RotaryEmbedding(c.rotary_dim(c.head_dim(), 0.25)),
    )


def nemotron(c: Config, architecture: str | None) -> Network:
    """Nemotron 3 and 4, Minitron: LayerNorm whose weight is added to one, squared ReLU without gate."""
    return dense_decoder(
        c,
        architecture,
        attention={**biases(c), "rotate": rotary_then_rest},
        mlp=lambda: _plain(c, bias=c.flag("mlp_bias")),
        norm=ShiftedLayerNorm,
        rotary=RotaryEmbedding(c.rotary_dim(c.head_dim(), 0.5)),
    )


FAMILIES = table(
    Family(
        "starcoder2",
        starcoder2,
        llama_sizes(
            (49152, 3072, 12288, 30, 24, 2, 4096),
            hidden_act="gelu_pytorch_tanh",
            use_bias=True,
            tie_word_embeddings=True,
        ),
    ),
    Family("stablelm", stablelm, llama_sizes((50304, 2560, 6912, 32, 32, 32, 4096))),
    Family("nemotron", nemotron, llama_sizes((256000, 6144, 24576, 32, 48, 0, 4096), hidden_act="relu2")),
)
