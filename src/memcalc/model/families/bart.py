"""BART and what descends from it: encoder and decoder with learned or sinusoidal positions and one embedding table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from memcalc.model import ops
from memcalc.model.cache import Cache
from memcalc.model.config import Config
from memcalc.model.families import Family
from memcalc.model.heads import unknown_head
from memcalc.model.module import Buffer, Module, Stack
from memcalc.model.network import Batch, Network, Outputs
from memcalc.model.seq2seq import decoder_cache, decoder_input, encoded, shift_right, wrap_right
from memcalc.model.sublayers.encoder_decoder import BlockStyle, DecoderBlock, EncoderBlock, StateAttention
from memcalc.model.sublayers.linear import Embedding, Linear
from memcalc.model.sublayers.losses import class_loss, token_loss
from memcalc.model.sublayers.masks import bidirectional_mask, causal_mask
from memcalc.model.sublayers.norms import LayerNorm
from memcalc.model.sublayers.positions import BufferedPositions, FrozenPositions, LearnedPositions, token_range
from memcalc.model.tensor import Tensor
from memcalc.tables.dtypes import FP32, INT64


@dataclass(frozen=True, slots=True)
class Style:
    """In what the family's models differ.

    `norm_first`: LayerNorms stand before the sublayers, and one more at the end of each stack. `embedding_norm`: a
    LayerNorm over the embeddings. `positions`: a learned table, a frozen sinusoidal one, or sinusoids in a buffer.
    `logits_bias`: a buffer is added to the logits. `wraps`: the last label becomes the decoder's first token. The
    decoder's mask of ones (`keeps_ones`) and positions (`keeps_positions`) outlive what is made of them where their
    names are not taken for it. `clamp`: see BlockStyle.
    """

    norm_first: bool
    embedding_norm: bool
    positions: Literal["learned", "frozen", "buffer"]
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
        self.embed_positions = _positions(c, style, hidden)
        self.style, self.dropout = style, c.probability("dropout")
        shared = BlockStyle(
            hidden, c.text("activation_function"), self.dropout, c.probability("activation_dropout"),
            style.norm_first, style.clamp,
        )  # fmt: skip
        heads, width = c.integer(f"{side}_attention_heads"), c.integer(f"{side}_ffn_dim")

        def attention() -> StateAttention:
            return StateAttention(hidden, heads, c.probability("attention_dropout"))

        def block(_: int) -> Module:
            if self.decoder:
                return DecoderBlock(shared, attention(), attention(), width)
            return EncoderBlock(shared, attention(), width)

        kinds = ["block"] * c.integer(f"{side}_layers")
        self.layers = Stack(kinds, block, name=f"{side} block", last_differs=self.decoder)
        self.layernorm_embedding = LayerNorm(hidden) if style.embedding_norm else None
        self.layer_norm = LayerNorm(hidden) if style.norm_first else None

    def _embedded(self, inputs_embeds: Tensor, positions: Tensor) -> Tensor:
        hidden = ops.add(inputs_embeds, positions)
        if self.layernorm_embedding is not None:
            hidden = self.layernorm_embedding(hidden)
        return ops.dropout(hidden, self.dropout)

    def forward(self, ids: Tensor, padding: bool) -> Tensor:
        """Ids [b, s] to hidden states [b, s, h]."""
        inputs_embeds = ops.scale(self.embed_tokens(ids))
        positions = self.embed_positions(ids, None)
        hidden = self._embedded(inputs_embeds, positions)
        mask = bidirectional_mask(inputs_embeds, padding)
        for layer in self.layers:
            hidden = layer(hidden, mask)
        return hidden if self.layer_norm is None else self.layer_norm(hidden)


def _positions(c: Config, style: Style, hidden: int) -> Module:
    count = c.integer("max_position_embeddings")
    if style.positions == "frozen":
        return FrozenPositions(count, hidden)
    return (LearnedPositions if style.positions == "learned" else BufferedPositions)(count + 2, hidden)


class BartDecoder(BartEncoder):
    """The same with attention over the encoder's states.

    It makes a padding mask of ones where it gets none, so that a real causal mask reaches attention in training.
    """

    decoder = True

    def forward(self, ids: Tensor, padding: bool, states: Tensor, cache: Cache | None) -> Tensor:  # type: ignore[override]
        """Ids [b, t] and encoder states [b, s, h] to hidden states [b, t, h]."""
        tape = ids.tape
        inputs_embeds = ops.scale(self.embed_tokens(ids))
        past = 0 if cache is None else cache.past
        position_ids = None if self.style.positions == "buffer" else ops.shift(token_range(ids))
        ones = tape.new((ids.shape[0], past + ids.shape[1]), FP32)
        mask = causal_mask(inputs_embeds, cache is None, past=past)
        if not self.style.keeps_ones:
            del ones
        states_mask = bidirectional_mask(inputs_embeds, padding, states.shape[1])
        positions = self.embed_positions(ids, position_ids)
        if not self.style.keeps_positions:
            del position_ids
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
        """What the decoder reads, and the cache that says how much it has read."""
        cache = decoder_cache(batch.ids.tape, in_training=False)
        return decoder_input(batch, labels, cache, self.shift), cache

    def forward(self, batch: Batch, decoder_ids: Tensor, cache: Cache | None) -> tuple[Tensor, Tensor]:
        """Hidden states of the decoder [b, t, h], and of the encoder [b, s, h]."""
        states = encoded(batch, cache, self.encoder)
        hidden = self.decoder(decoder_ids, batch.padding, states, cache)
        if cache is not None:
            cache.past += decoder_ids.shape[1]
        return hidden, states


class BartForConditionalGeneration(Network):
    """With a vocabulary head that shares the decoder's table."""

    def __init__(self, c: Config, style: Style) -> None:
        self.model = BartModel(c, style)
        table = self.model.decoder.embed_tokens
        vocab, hidden = table.weight.shape
        self.final_logits_bias = Buffer(1, vocab, dtype=None, group="LM head") if style.logits_bias else None
        self.lm_head = Linear(hidden, vocab, group="LM head")
        if c.flag("tie_word_embeddings", True):
            self.lm_head.weight = table.weight

    def forward(self, batch: Batch) -> Outputs:
        """Loss and logits. In generation, the first call encodes and decodes a start token, later ones decode."""
        labels = None if batch.labels is None else batch.target()
        decoder_ids, cache = self.model.decoder_ids(batch, labels)
        hidden, states = self.model.forward(batch, decoder_ids, cache)
        with hidden.tape.scoped("LM head and loss"):
            logits = self.lm_head(hidden)
            if self.final_logits_bias is not None:
                logits = ops.add(logits, self.final_logits_bias)
            loss = None if labels is None else token_loss(logits, labels)
        return Outputs(loss, (logits, states))


class BartForSequenceClassification(Network):
    """A class per sequence, from the decoder's state at the end-of-sequence token."""

    def __init__(self, c: Config, style: Style) -> None:
        hidden = c.integer("d_model")
        self.model = BartModel(c, style)
        self.dense = Linear(hidden, hidden, bias=True, group="head")
        self.out_proj = Linear(hidden, c.num_labels(3), bias=True, group="head")
        self.dropout = c.probability("classifier_dropout")
        self.problem = c.problem_type()

    def forward(self, batch: Batch) -> Outputs:
        """Loss and logits [b, classes]; the decoder reads the shifted source."""
        hidden, states = self.model.forward(batch, *self.model.decoder_ids(batch, batch.ids))
        tape, size = hidden.tape, batch.ids.shape[0]
        with tape.scoped("head and loss"):
            _is_end = ops.compare(batch.ids)
            places = ops.unbind(tape.new((size, 2), INT64), 1)
            ends = ops.pick(hidden, *places)
            pooled = ops.select(ops.view(ends, size, -1, hidden.shape[-1]), 1)
            out = ops.dropout(pooled, self.dropout)
            out = self.dense(out)
            out = ops.tanh(out)
            out = ops.dropout(out, self.dropout)
            logits = self.out_proj(out)
            loss = None if batch.labels is None else class_loss(logits, batch.class_labels(), self.problem)
        return Outputs(loss, (logits, states))


_LM = ("ForConditionalGeneration", "MTModel", "Model")


def _network(c: Config, architecture: str | None, style: Style) -> Network:
    name = architecture or _LM[0]
    if name.endswith("ForSequenceClassification"):
        return BartForSequenceClassification(c, style)
    if name.endswith(_LM):
        return BartForConditionalGeneration(c, style)
    raise unknown_head(c, name, (_LM[0], "ForSequenceClassification"))


STYLES = {
    "bart": Style(False, True, "learned", keeps_ones=False, clamp="if infinite"),
    "mbart": Style(True, True, "learned", wraps=True, keeps_positions=False),
    "pegasus": Style(True, False, "frozen"),
    "marian": Style(False, False, "frozen", keeps_positions=False, clamp="if infinite"),
    "m2m_100": Style(True, False, "buffer", logits_bias=False, keeps_ones=False),
}


def _family(name: str, **defaults: object) -> Family:
    style = STYLES[name]

    def build(c: Config, architecture: str | None) -> Network:
        return _network(c, architecture, style)

    common = {
        "vocab_size": 50265, "max_position_embeddings": 1024, "d_model": 1024, "activation_function": "gelu",
        "encoder_layers": 12, "encoder_ffn_dim": 4096, "encoder_attention_heads": 16,
        "decoder_layers": 12, "decoder_ffn_dim": 4096, "decoder_attention_heads": 16,
        "dropout": 0.1, "attention_dropout": 0.0, "activation_dropout": 0.0, "classifier_dropout": 0.0,
    }  # fmt: skip
    aliases = {
        "num_attention_heads": "encoder_attention_heads", "num_hidden_layers": "encoder_layers",
        "hidden_size": "d_model",
    }  # fmt: skip
    return Family(
        name, build, {**common, **defaults}, aliases, blocks="encoder-decoder", verified="measured rows, exact counts"
    )


FAMILIES = {
    "bart": _family("bart"),
    "mbart": _family("mbart"),
    "pegasus": _family("pegasus"),
    "marian": _family("marian", vocab_size=58101),
    "m2m_100": _family("m2m_100", vocab_size=128112, activation_function="relu", attention_dropout=0.1),
}
