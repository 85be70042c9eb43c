"""Moonshine: convolutions over samples, an encoder and a decoder that rotate a part of each head.

Source: transformers/models/moonshine 5.24. The sequence length is the number of samples (16,000 a second).
"""

from __future__ import annotations

from memcalc import ops
from memcalc.autograd.tape import OVERHEAD
from memcalc.autograd.tensor import Tensor
from memcalc.config.reader import Config
from memcalc.errors import ConfigError, TooShortError, UsageError
from memcalc.models.common.heads import unknown_head
from memcalc.models.common.seq2seq import decoder_cache, decoder_input, encoded
from memcalc.models.family import Family, table
from memcalc.nn.kv_cache import Cache
from memcalc.nn.layers.attention_backends import attend, split_heads
from memcalc.nn.layers.linear import Embedding, Linear
from memcalc.nn.layers.losses import aligned_lm_loss
from memcalc.nn.layers.masks import causal_mask
from memcalc.nn.layers.mlp import PlainMLP, activation
from memcalc.nn.layers.norms import LayerNorm
from memcalc.nn.layers.rotary import RotaryEmbedding, Rotation
from memcalc.nn.layers.rotary_interleaved import rotary_pairs_of_part
from memcalc.nn.layers.wav2vec2 import Convolution, GroupNorm
from memcalc.nn.model import Batch, Network, Outputs, positions
from memcalc.nn.module import Module
from memcalc.nn.run_context import run_context
from memcalc.nn.stack import Stack
from memcalc.tables.dtypes import INT64

_CONVOLUTIONS = ((127, 64), (7, 3), (3, 2))
"""Width and stride of the encoder's convolutions."""


class MoonshineAttention(Module):
    """Attention over its own input, rotated, or over an encoder's states; heads may be padded for the kernels."""

    scope = "attention"

    def __init__(self, c: Config, side: str) -> None:
        hidden, heads = c.integer("hidden_size"), c.divides(f"{side}_num_attention_heads", "hidden_size")
        if c.integer(f"{side}_num_key_value_heads", heads) != heads:
            raise ConfigError(
                f"{c.where} has fewer key-value heads than heads, which Transformers' Moonshine cannot run; "
                "leave out the number of key-value heads."
            )
        self.head_dim, bias = hidden // heads, c.flag("attention_bias")
        multiple = c.optional("pad_head_dim_to_multiple_of")
        self.padding = -self.head_dim % multiple if multiple else 0
        self.dropout = c.probability("attention_dropout", 0.0)
        self.q_proj = Linear(hidden, hidden, bias=bias, group="attention")
        self.k_proj = Linear(hidden, hidden, bias=bias, group="attention")
        self.v_proj = Linear(hidden, hidden, bias=bias, group="attention")
        self.o_proj = Linear(hidden, hidden, group="attention")

    def forward(
        self,
        hidden: Tensor,
        rotation: Rotation | None,
        mask: Tensor | None = None,
        states: Tensor | None = None,
        cache: Cache | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """[b, s, h] to [b, s, h], and the probabilities where they exist; keys and values from `states` if given."""
        query = split_heads(self.q_proj(hidden), self.head_dim)
        current = hidden if states is None else states
        cached = None if cache is None or states is None else cache.cross_attention_key_values(self)
        if cached is not None:
            key, value = cached
        else:
            key = split_heads(self.k_proj(current), self.head_dim)
            value = split_heads(self.v_proj(current), self.head_dim)
            if rotation is not None:
                query, key = rotary_pairs_of_part(query, key, *rotation)
            if cache is not None:
                key, value = cache.update(self, key, value)
        del cached
        if self.padding:
            query = ops.pad(query, -1, self.padding)
            key = ops.pad(key, -1, self.padding)
            value = ops.pad(value, -1, self.padding)
        out, weights = attend(query, key, value, mask, 1, self.dropout)
        if self.padding:
            out = ops.narrow(out, -1, self.head_dim)
        out = ops.contiguous(ops.reshape(out, *hidden.shape[:-1], -1))
        out = self.o_proj(out)
        return out, weights


class GateSecondMLP(Module):
    """fc2(first half of fc1(x) times the activated second half)."""

    scope = "MLP"

    def __init__(self, hidden: int, width: int, act: str) -> None:
        self.act = activation(act)
        self.fc1 = Linear(hidden, 2 * width, bias=True, group="MLP")
        self.fc2 = Linear(width, hidden, bias=True, group="MLP")

    def forward(self, hidden: Tensor) -> Tensor:
        """[b, s, h] to [b, s, h]."""
        hidden, gate = ops.chunk(self.fc1(hidden), 2, -1)
        hidden = ops.mul(self.act(gate), hidden)
        return self.fc2(hidden)


class EncoderLayer(Module):
    """LayerNorm, attention, add; LayerNorm, MLP, add."""

    scope = "residual stream"

    def __init__(self, c: Config) -> None:
        hidden, width, act = c.integer("hidden_size"), c.integer("intermediate_size"), c.text("encoder_hidden_act")
        self.self_attn = MoonshineAttention(c, "encoder")
        self.mlp: Module = PlainMLP(hidden, width, act, names=("fc1", "fc2"), bias=True)
        self.input_layernorm = LayerNorm(hidden, bias=False)
        self.post_attention_layernorm = LayerNorm(hidden, bias=False)

    def forward(self, hidden: Tensor, rotation: Rotation, position_ids: Tensor) -> Tensor:
        """[b, s, h] to [b, s, h]. Position ids are given, and not used."""
        residual = hidden
        hidden = self.input_layernorm(hidden)
        hidden, _weights = self.self_attn(hidden, rotation)
        hidden = ops.add(residual, hidden)
        residual = hidden
        hidden = self.post_attention_layernorm(hidden)
        hidden = self.mlp(hidden)
        return ops.add(residual, hidden)


class DecoderLayer(Module):
    """The same with attention over the encoder's states in between."""

    scope = "residual stream"

    def __init__(self, c: Config) -> None:
        hidden, width, act = c.integer("hidden_size"), c.integer("intermediate_size"), c.text("decoder_hidden_act")
        self.self_attn, self.encoder_attn = MoonshineAttention(c, "decoder"), MoonshineAttention(c, "decoder")
        self.mlp = GateSecondMLP(hidden, width, act)
        self.input_layernorm = LayerNorm(hidden, bias=False)
        self.post_attention_layernorm = LayerNorm(hidden, bias=False)
        self.final_layernorm = LayerNorm(hidden, bias=False)

    def forward(
        self,
        hidden: Tensor,
        mask: Tensor | None,
        states: Tensor,
        rotation: Rotation,
        position_ids: Tensor,
        cache: Cache | None,
    ) -> Tensor:
        """[b, t, h] to [b, t, h]. Position ids are given, and not used."""
        residual = hidden
        hidden = self.input_layernorm(hidden)
        hidden, _weights = self.self_attn(hidden, rotation, mask, cache=cache)
        hidden = ops.add(residual, hidden)
        residual = hidden
        hidden = self.post_attention_layernorm(hidden)
        hidden, _weights = self.encoder_attn(hidden, None, states=states, cache=cache)
        hidden = ops.add(residual, hidden)
        residual = hidden
        hidden = self.final_layernorm(hidden)
        hidden = self.mlp(hidden)
        return ops.add(residual, hidden)


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
