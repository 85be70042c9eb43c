"""Whisper: convolutions over a mel spectrogram, an encoder of fixed length, a decoder that writes the transcript."""

from __future__ import annotations

from memcalc import ops
from memcalc.autograd.tape import OVERHEAD
from memcalc.autograd.tensor import Tensor
from memcalc.config.reader import Config
from memcalc.models.common.heads import unknown_head
from memcalc.models.common.seq2seq import decoder_cache, decoder_input, encoded
from memcalc.models.family import Family, table
from memcalc.nn.kv_cache import Cache
from memcalc.nn.layers.bart import BartAttention, BlockStyle, DecoderBlock, EncoderBlock
from memcalc.nn.layers.linear import Embedding, Linear, check_length
from memcalc.nn.layers.losses import token_loss
from memcalc.nn.layers.masks import causal_mask
from memcalc.nn.layers.norms import LayerNorm
from memcalc.nn.layers.position_embeddings import FrozenTable, token_range
from memcalc.nn.model import Batch, Network, Outputs
from memcalc.nn.module import Module, Parameter
from memcalc.nn.stack import Stack
from memcalc.tables.dtypes import INT64


class Conv(Module):
    """A convolution of width three over time."""

    scope = "convolutions"

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        self.weight = Parameter(outputs, inputs, 3, group="other")
        self.bias = Parameter(outputs, group="other")
        self.stride = stride

    def forward(self, x: Tensor) -> Tensor:
        """[b, inputs, t] to [b, outputs, t / stride]."""
        return ops.convolution(x, self.weight, self.bias, stride=self.stride, padding=1)


def whisper_blocks(c: Config, side: str) -> Stack:
    """The blocks of one side (`encoder` or `decoder`)."""
    hidden, heads, width = c.integer("d_model"), c.integer(f"{side}_attention_heads"), c.integer(f"{side}_ffn_dim")
    style = BlockStyle(
        hidden, c.text("activation_function"), c.probability("dropout"), c.probability("activation_dropout"), True
    )

    def attention() -> BartAttention:
        return BartAttention(hidden, heads, c.probability("attention_dropout"), scale_query=True)

    def block(_: int) -> Module:
        if side == "decoder":
            return DecoderBlock(style, attention(), attention(), width)
        return EncoderBlock(style, attention(), width)

    kinds = ["block"] * c.integer(f"{side}_layers")
    return Stack(kinds, block, name=f"{side} block")


class WhisperEncoder(Module):
    """Two convolutions, frozen positions, blocks, LayerNorm."""

    def __init__(self, c: Config) -> None:
        hidden, self.mels = c.integer("d_model"), c.integer("num_mel_bins")
        self.length = c.integer("max_source_positions")
        self.conv1 = Conv(self.mels, hidden, 1)
        self.conv1.is_input_embedding = True
        self.conv2 = Conv(hidden, hidden, 2)
        self.embed_positions = FrozenTable(self.length, hidden)
        self.layers = whisper_blocks(c, "encoder")
        self.layer_norm = LayerNorm(hidden)
        self.dropout = c.probability("dropout")

    def forward(self, ids: Tensor, _padding: bool) -> Tensor:
        """Mel features [b, mels, 2 s] to hidden states [b, s, h]; the ids only give their batch size."""
        tape, dtype = ids.tape, self.conv1.weight.dtype
        features = tape.external_tensor((ids.shape[0], self.mels, 2 * self.length), dtype, OVERHEAD, "mel features")
        inputs_embeds = ops.gelu(self.conv1(features))
        inputs_embeds = ops.gelu(self.conv2(inputs_embeds))
        inputs_embeds = ops.permute(inputs_embeds, 0, 2, 1)
        all_positions = tape.empty((self.length,), INT64)
        hidden = ops.add(inputs_embeds, self.embed_positions(all_positions))
        hidden = ops.dropout(hidden, self.dropout)
        for layer in self.layers:
            hidden = layer(hidden, None)
        return self.layer_norm(hidden)


class WhisperDecoder(Module):
    """Token and learned position embeddings, blocks, LayerNorm."""

    def __init__(self, c: Config) -> None:
        hidden = c.integer("d_model")
        self.embed_tokens = Embedding(c.integer("vocab_size"), hidden)
        self.embed_positions = Embedding(c.integer("max_target_positions"), hidden)
        self.layers = whisper_blocks(c, "decoder")
        self.layer_norm = LayerNorm(hidden)
        self.dropout = c.probability("dropout")

    def forward(self, ids: Tensor, states: Tensor, cache: Cache | None) -> Tensor:
        """Ids [b, t] and encoder states [b, s, h] to hidden states [b, t, h]."""
        inputs_embeds = self.embed_tokens(ids)
        if cache is None:
            check_length(ids, self.embed_positions.weight.shape[0], "--target-len")
        position_ids = ops.add_scalar(token_range(ids))
        position_ids = ops.clone(ops.expand(ops.unsqueeze(position_ids, 0), *ids.shape), contiguous=True)
        positions = ops.index_select(self.embed_positions.weight, position_ids)
        hidden = ops.add(inputs_embeds, positions)
        hidden = ops.dropout(hidden, self.dropout)
        mask = causal_mask(inputs_embeds, False, past=0 if cache is None else cache.past)
        for layer in self.layers:
            hidden = layer(hidden, mask, states, states_mask=None, cache=cache)
        return self.layer_norm(hidden)


class WhisperModel(Module):
    """Encoder and decoder."""

    def __init__(self, c: Config) -> None:
        self.encoder = WhisperEncoder(c)
        self.decoder = WhisperDecoder(c)


class WhisperForConditionalGeneration(Network):
    """With a vocabulary head that shares the decoder's table."""

    main_input = "input_features"
    source_is_text = False

    def __init__(self, c: Config) -> None:
        self.model = WhisperModel(c)
        table = self.model.decoder.embed_tokens
        self.proj_out = Linear(table.weight.shape[1], table.weight.shape[0], group="LM head")
        if c.flag("tie_word_embeddings", True):
            self.proj_out.weight = table.weight

    def forward(self, batch: Batch) -> Outputs:
        """Loss and logits. In generation, the first call encodes and decodes a start token, later ones decode."""
        cache = decoder_cache(batch.ids.tape, in_training=False)
        labels = None if batch.labels is None else batch.target()
        if labels is None and cache is not None:  # generation encodes first
            encoded(batch, cache, self.model.encoder)
        decoder_ids = decoder_input(batch, labels, cache)
        states = encoded(batch, cache, self.model.encoder)
        hidden = self.model.decoder(decoder_ids, states, cache)
        if cache is not None:
            cache.past += decoder_ids.shape[1]
        with hidden.tape.scoped("head and loss"):
            logits = self.proj_out(hidden)
            loss = None if labels is None else token_loss(logits, labels)
        return Outputs(loss, (logits, states))


def whisper(c: Config, architecture: str | None) -> Network:
    """Whisper of every size and version."""
    name = architecture or "WhisperForConditionalGeneration"
    if name in ("WhisperForConditionalGeneration", "WhisperModel"):
        return WhisperForConditionalGeneration(c)
    raise unknown_head(c, name, ("WhisperForConditionalGeneration",))


FAMILIES = table(
    Family(
        "whisper",
        whisper,
        {
            "vocab_size": 51865,
            "num_mel_bins": 80,
            "d_model": 384,
            "max_source_positions": 1500,
            "max_target_positions": 448,
            "activation_function": "gelu",
            "dropout": 0.0,
            "attention_dropout": 0.0,
            "activation_dropout": 0.0,
            "encoder_layers": 4,
            "encoder_attention_heads": 6,
            "encoder_ffn_dim": 1536,
            "decoder_layers": 4,
            "decoder_attention_heads": 6,
            "decoder_ffn_dim": 1536,
        },
        {
            "num_attention_heads": "encoder_attention_heads",
            "num_hidden_layers": "encoder_layers",
            "hidden_size": "d_model",
        },
        blocks="encoder-decoder",
    )
)
