"""Moonshine: convolutions over samples, an encoder and a decoder that rotate a part of each head.

Source: transformers/models/moonshine 5.24. The sequence length is the number of samples (16,000 a second).
"""

from __future__ import annotations

from memcalc import ops
from memcalc.autograd.tape import OVERHEAD
from memcalc.autograd.tensor import Tensor
from memcalc.config.reader import Config
from memcalc.errors import TooShortError, UsageError
from memcalc.models.common.heads import unknown_head
from memcalc.models.common.seq2seq import decoder_cache, decoder_input, encoded
from memcalc.models.families.audio.moonshine_blocks import DecoderLayer, EncoderLayer
from memcalc.models.family import Family, table
from memcalc.nn.kv_cache import Cache
from memcalc.nn.layers.linear import Embedding, Linear
from memcalc.nn.layers.losses import aligned_lm_loss
from memcalc.nn.layers.masks import causal_mask
from memcalc.nn.layers.norms import LayerNorm
from memcalc.nn.layers.rotary import RotaryEmbedding
from memcalc.nn.layers.wav2vec2 import Convolution, GroupNorm
from memcalc.nn.model import Batch, Network, Outputs, positions
from memcalc.nn.module import Module
from memcalc.nn.run_context import run_context
from memcalc.nn.stack import Stack
from memcalc.tables.dtypes import INT64

_CONVOLUTIONS = ((127, 64), (7, 3), (3, 2))
"""Width and stride of the encoder's convolutions."""


def _rotary(c: Config, side: str) -> RotaryEmbedding:
    head_dim = c.integer("hidden_size") // c.divides(f"{side}_num_attention_heads", "hidden_size")
    return RotaryEmbedding(c.rotary_dim(head_dim, 0.9))


class MoonshineEncoder(Module):
    """Three convolutions with a GroupNorm, blocks, LayerNorm."""

    def __init__(self, c: Config) -> None:
        hidden = c.integer("hidden_size")
        (first, second, third) = _CONVOLUTIONS
        self.conv1 = Convolution(1, hidden, *first, bias=False)
        self.conv1.is_input_embedding = True
        self.conv2 = Convolution(hidden, 2 * hidden, *second, bias=True)
        self.conv3 = Convolution(2 * hidden, hidden, *third, bias=True)
        self.groupnorm = GroupNorm(hidden, 1)
        depth = c.integer("encoder_num_hidden_layers")
        self.layers = Stack(["block"] * depth, lambda _: EncoderLayer(c), name="encoder block")
        self.layer_norm = LayerNorm(hidden, bias=False)
        self.rotary_emb = _rotary(c, "encoder")

    def forward(self, samples: Tensor) -> Tensor:
        """Samples [b, n] to hidden states [b, s, h]."""
        left = samples.shape[1]
        for width, stride in _CONVOLUTIONS:
            left = (left - width) // stride + 1
            if left < 1:
                raise TooShortError(
                    f"{samples.shape[1]:,} samples are too few for the convolutions; --seq-len is the number of "
                    "samples, 16,000 for a second."
                )
        hidden = ops.tanh(self.conv1(ops.unsqueeze(samples, 1)))
        hidden = self.groupnorm(hidden)
        hidden = ops.gelu(self.conv2(hidden))
        hidden = ops.gelu(self.conv3(hidden))
        hidden = ops.permute(hidden, 0, 2, 1)
        position_ids = ops.unsqueeze(samples.tape.empty((hidden.shape[1],), INT64), 0)
        rotation = self.rotary_emb(hidden, position_ids)
        for layer in self.layers:
            hidden = layer(hidden, rotation=rotation, position_ids=position_ids)
        return self.layer_norm(hidden)


class MoonshineDecoder(Module):
    """Token embeddings, blocks, LayerNorm."""

    def __init__(self, c: Config) -> None:
        hidden, depth = c.integer("hidden_size"), c.integer("decoder_num_hidden_layers")
        self.embed_tokens = Embedding(c.integer("vocab_size"), hidden)
        self.layers = Stack(["block"] * depth, lambda _: DecoderLayer(c), name="decoder block")
        self.norm = LayerNorm(hidden, bias=False)
        self.rotary_emb = _rotary(c, "decoder")

    def forward(self, ids: Tensor, states: Tensor, cache: Cache | None) -> Tensor:
        """Ids [b, t] and encoder states [b, s, h] to hidden states [b, t, h]."""
        inputs_embeds = self.embed_tokens(ids)
        position_ids = positions(ids.tape, ids.shape[1])
        mask = causal_mask(inputs_embeds, False, past=0 if cache is None else cache.past)
        hidden = inputs_embeds
        rotation = self.rotary_emb(hidden, position_ids)
        for layer in self.layers:
            hidden = layer(hidden, mask, states, rotation=rotation, position_ids=position_ids, cache=cache)
        return self.norm(hidden)


class MoonshineForConditionalGeneration(Network):
    """With a vocabulary head that shares the decoder's table; ten seconds of a recording unless --seq-len says."""

    main_input = "input_values"
    default_length = 160_000
    length_unit = "samples, 16,000 a second"

    def __init__(self, c: Config) -> None:
        self.encoder = MoonshineEncoder(c)
        self.decoder = MoonshineDecoder(c)
        self.longest_target = c.integer("max_position_embeddings")
        table = self.decoder.embed_tokens
        self.proj_out = Linear(table.weight.shape[1], table.weight.shape[0], group="LM head")
        if c.flag("tie_word_embeddings", True):
            self.proj_out.weight = table.weight

    def _encode(self, batch: Batch) -> Tensor:
        if batch.padding:
            raise UsageError("memcalc describes recordings of one length; leave out --padding-mask.")
        tape = batch.ids.tape
        tape.inputs.remove(batch.ids.storage.allocation)
        shape, dtype = batch.ids.shape, run_context(tape).weights_dtype
        return self.encoder(tape.external_tensor(shape, dtype, OVERHEAD, "samples"))

    def forward(self, batch: Batch) -> Outputs:
        """Loss and logits. In generation, the first call encodes and decodes a start token, later ones decode."""
        tape, cache = batch.ids.tape, decoder_cache(batch.ids.tape, in_training=False)
        labels = None
        if batch.labels is not None:
            length = batch.target_len or self.longest_target or batch.ids.shape[1]
            labels = tape.external_tensor((batch.ids.shape[0], length), INT64, OVERHEAD, "labels")
        elif cache is not None:
            encoded(batch, cache, lambda _ids, _padding: self._encode(batch))
        ids = decoder_input(batch, labels, cache)
        states = encoded(batch, cache, lambda _ids, _padding: self._encode(batch))
        hidden = self.decoder(ids, states, cache)
        if cache is not None:
            cache.past += ids.shape[1]
        with hidden.tape.scoped("head and loss"):
            logits = self.proj_out(hidden)
            loss = None if labels is None else aligned_lm_loss(logits, labels)
        return Outputs(loss, (logits, states))


def moonshine(c: Config, architecture: str | None) -> Network:
    """Moonshine of every size and language."""
    if architecture not in (None, "MoonshineForConditionalGeneration", "MoonshineModel"):
        raise unknown_head(c, str(architecture), ("MoonshineForConditionalGeneration",))
    return MoonshineForConditionalGeneration(c)


FAMILIES = table(
    Family(
        "moonshine",
        moonshine,
        {
            "vocab_size": 32768,
            "hidden_size": 288,
            "intermediate_size": 1152,
            "encoder_num_hidden_layers": 6,
            "decoder_num_hidden_layers": 6,
            "encoder_num_attention_heads": 8,
            "decoder_num_attention_heads": 8,
            "encoder_hidden_act": "gelu",
            "decoder_hidden_act": "silu",
            "max_position_embeddings": 512,
            "attention_dropout": 0.0,
        },
        {
            "num_attention_heads": "decoder_num_attention_heads",
            "num_hidden_layers": "decoder_num_hidden_layers",
            "hidden_act": "decoder_hidden_act",
        },
        blocks="encoder-decoder",
        positions_of_target=True,
    )
)
