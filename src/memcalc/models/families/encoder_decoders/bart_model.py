"""Encoder and decoder of BART and its relatives, by style."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.config.reader import Config
from memcalc.models.common.seq2seq import decoder_cache, decoder_input, encoded, shift_right, wrap_right
from memcalc.nn.kv_cache import Cache
from memcalc.nn.layers.bart import BartAttention, BlockStyle, DecoderBlock, EncoderBlock
from memcalc.nn.layers.linear import Embedding
from memcalc.nn.layers.masks import OWN_ONES_NOTE, bidirectional_mask, causal_mask
from memcalc.nn.layers.norms import LayerNorm
from memcalc.nn.layers.position_embeddings import KINDS, token_range
from memcalc.nn.model import Batch
from memcalc.nn.module import Module
from memcalc.nn.stack import Stack
from memcalc.tables.dtypes import FP32


@dataclass(frozen=True)
class Style:
    """In what the families of BART differ.

    norm_first: LayerNorms stand before the sublayers, and one more at the end of each stack.
    embedding_norm: a LayerNorm over the embeddings.
    positions: the kind of position embedding.
    token_norm: in a decoder, that LayerNorm is over the token embeddings only, which are not scaled.
    logits_bias: a buffer is added to the logits.
    wraps: the last label becomes the decoder's first token.
    keeps_ones, keeps_positions: the decoder's mask of ones and positions outlive what is made of them.
    clamp: as of BlockStyle.
    """

    norm_first: bool
    embedding_norm: bool
    positions: Literal["learned", "unshifted", "frozen", "buffer"]
    token_norm: bool = False
    logits_bias: bool = True
    wraps: bool = False
    keeps_ones: bool = True
    keeps_positions: bool = True
    clamp: Literal["always", "if infinite"] = "always"


class BartEncoder(Module):
    """Embeddings, blocks and, in pre-norm models, a last LayerNorm."""

    decoder = False

    def __init__(self, c: Config, table: Embedding, style: Style) -> None:
        hidden = c.integer("d_model")
        side = "decoder" if self.decoder else "encoder"
        self.embed_tokens = table
        self.embed_positions = KINDS[style.positions](c.integer("max_position_embeddings"), hidden)
        self.style, self.dropout = style, c.probability("dropout")
        shared = BlockStyle(
            hidden,
            c.text("activation_function"),
            self.dropout,
            c.probability("activation_dropout"),
            style.norm_first,
            style.clamp,
        )
        heads, width = c.integer(f"{side}_attention_heads"), c.integer(f"{side}_ffn_dim")

        def attention() -> BartAttention:
            return BartAttention(hidden, heads, c.probability("attention_dropout"))

        def block(_: int) -> Module:
            if self.decoder:
                return DecoderBlock(shared, attention(), attention(), width)
            return EncoderBlock(shared, attention(), width)

        kinds = ["block"] * c.integer(f"{side}_layers")
        self.layers = Stack(kinds, block, name=f"{side} block")
        self.layernorm_embedding = LayerNorm(hidden) if style.embedding_norm else None
        self.layer_norm = LayerNorm(hidden) if style.norm_first else None

    def _embedded(self, inputs_embeds: Tensor, positions: Tensor) -> Tensor:
        hidden = ops.add(inputs_embeds, positions)
        if self.layernorm_embedding is not None and not (self.decoder and self.style.token_norm):
            hidden = self.layernorm_embedding(hidden)
        return ops.dropout(hidden, self.dropout)

    def forward(self, ids: Tensor, padding: bool) -> Tensor:
        """Ids [b, s] to hidden states [b, s, h]."""
        inputs_embeds = ops.mul_scalar(self.embed_tokens(ids))
        positions = self.embed_positions(ids, None)
        hidden = self._embedded(inputs_embeds, positions)
        mask = bidirectional_mask(inputs_embeds, padding)
        for layer in self.layers:
            hidden = layer(hidden, mask)
        return hidden if self.layer_norm is None else self.layer_norm(hidden)


class BartDecoder(BartEncoder):
    """The same with attention over the encoder's states.

    It makes a padding mask of ones where it gets none, so that a real causal mask reaches attention.
    """

    decoder = True
    assumption = OWN_ONES_NOTE

    def forward(self, ids: Tensor, padding: bool, states: Tensor, cache: Cache | None) -> Tensor:  # type: ignore[override]
        """Ids [b, t] and encoder states [b, s, h] to hidden states [b, t, h]."""
        tape = ids.tape
        inputs_embeds = self.embed_tokens(ids)
        if not self.style.token_norm:
            inputs_embeds = ops.mul_scalar(inputs_embeds)
        past = 0 if cache is None else cache.past
        position_ids = None if self.style.positions == "buffer" else ops.add_scalar(token_range(ids))
        ones = tape.empty((ids.shape[0], past + ids.shape[1]), FP32)
        mask = causal_mask(inputs_embeds, True, past=past)
        if not self.style.keeps_ones:
            del ones
        states_mask = bidirectional_mask(inputs_embeds, padding, states.shape[1])
        positions = self.embed_positions(ids, position_ids)
        if not self.style.keeps_positions:
            del position_ids
        if self.layernorm_embedding is not None and self.style.token_norm:
            inputs_embeds = self.layernorm_embedding(inputs_embeds)
        hidden = self._embedded(inputs_embeds, positions)
        for layer in self.layers:
            hidden = layer(hidden, mask, states, states_mask=states_mask, cache=cache)
        return hidden if self.layer_norm is None else self.layer_norm(hidden)


class BartModel(Module):
    """Encoder and decoder over one table of embeddings; with their own where the config unties them.

    Then the shared one stays unused. Marian's languages may have a table each.
    """

    def __init__(self, c: Config, style: Style) -> None:
        vocab, hidden = c.integer("vocab_size"), c.integer("d_model")
        self.shared = Embedding(vocab, hidden)
        tied, together = c.flag("tie_word_embeddings", True), c.flag("share_encoder_decoder_embeddings", True)
        source = self.shared if tied else Embedding(vocab, hidden)
        self.encoder = BartEncoder(c, source, style)
        target = self.shared
        if not tied or not together:
            target = Embedding(c.integer("decoder_vocab_size", vocab), hidden)
        self.decoder = BartDecoder(c, target, style)
        self.shift = wrap_right if style.wraps else shift_right

    def decoder_ids(self, batch: Batch, labels: Tensor | None) -> tuple[Tensor, Cache | None]:
        """What the decoder reads, and the cache that says how much it has read. Generation encodes first."""
        cache = decoder_cache(batch.ids.tape, in_training=False)
        if labels is None and cache is not None:
            encoded(batch, cache, self.encoder)
        return decoder_input(batch, labels, cache, self.shift), cache

    def forward(self, batch: Batch, decoder_ids: Tensor, cache: Cache | None) -> tuple[Tensor, Tensor]:
        """Hidden states of the decoder [b, t, h], and of the encoder [b, s, h]."""
        states = encoded(batch, cache, self.encoder)
        hidden = self.decoder(decoder_ids, batch.padding, states, cache)
        if cache is not None:
            cache.past += decoder_ids.shape[1]
        return hidden, states
