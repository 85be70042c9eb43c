"""BART and what descends from it: encoder and decoder with learned or sinusoidal positions and one embedding table."""

from __future__ import annotations

from collections.abc import Callable

from memcalc import ops
from memcalc.config.reader import Config
from memcalc.models.common.heads import with_head
from memcalc.models.families.encoder_decoders.bart_model import BartModel, Style
from memcalc.models.family import MEASURED, Family, table
from memcalc.nn.layers.linear import Linear
from memcalc.nn.layers.losses import class_loss, token_loss
from memcalc.nn.model import Batch, Network, Outputs
from memcalc.nn.module import Buffer
from memcalc.tables.dtypes import INT64


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
        with hidden.tape.scoped("head and loss"):
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
            places = ops.unbind(tape.empty((size, 2), INT64), 1)
            ends = ops.index(hidden, *places)
            pooled = ops.select(ops.view(ends, size, -1, hidden.shape[-1]), 1)
            out = ops.dropout(pooled, self.dropout)
            out = self.dense(out)
            out = ops.tanh(out)
            out = ops.dropout(out, self.dropout)
            logits = self.out_proj(out)
            loss = None if batch.labels is None else class_loss(logits, batch.class_labels(), self.problem)
        return Outputs(loss, (logits, states))


def _network(c: Config, architecture: str | None, style: Style) -> Network:
    known: dict[str, Callable[[], Network]] = {
        "ForConditionalGeneration": lambda: BartForConditionalGeneration(c, style),
        "ForSequenceClassification": lambda: BartForSequenceClassification(c, style),
    }
    usual = architecture is not None and architecture.endswith(("MTModel", "Model"))
    return with_head(c, None if usual else architecture, known)


STYLES = {
    "bart": Style(False, True, "learned", keeps_ones=False, clamp="if infinite"),
    "mbart": Style(True, True, "learned", wraps=True, keeps_positions=False),
    "pegasus": Style(True, False, "frozen"),
    "plbart": Style(False, True, "learned", wraps=True, keeps_ones=False, clamp="if infinite"),
    "blenderbot": Style(True, False, "unshifted", keeps_positions=False),
    "blenderbot-small": Style(False, True, "unshifted", token_norm=True, keeps_positions=False, clamp="if infinite"),
    "marian": Style(False, False, "frozen", keeps_positions=False, clamp="if infinite"),
    "m2m_100": Style(True, False, "buffer", logits_bias=False, keeps_ones=False),
}


def _family(
    name: str, layers: int = 12, width: int = 4096, heads: int = 16, *, counted: bool = True, **defaults: object
) -> Family:
    style = STYLES[name]

    def build(c: Config, architecture: str | None) -> Network:
        return _network(c, architecture, style)

    common = {
        "vocab_size": 50265,
        "max_position_embeddings": 1024,
        "d_model": 1024,
        "activation_function": "gelu",
        "encoder_layers": layers,
        "encoder_ffn_dim": width,
        "encoder_attention_heads": heads,
        "decoder_layers": layers,
        "decoder_ffn_dim": width,
        "decoder_attention_heads": heads,
        "dropout": 0.1,
        "attention_dropout": 0.0,
        "activation_dropout": 0.0,
        "classifier_dropout": 0.0,
    }
    aliases = {
        "num_attention_heads": "encoder_attention_heads",
        "num_hidden_layers": "encoder_layers",
        "hidden_size": "d_model",
    }
    verified = MEASURED if counted else "measured rows"
    return Family(name, build, {**common, **defaults}, aliases, blocks="encoder-decoder", verified=verified)


FAMILIES = table(
    _family("bart"),
    _family("mbart"),
    _family("pegasus"),
    _family("plbart", 6, 3072, 12, counted=False, vocab_size=50005, d_model=768, attention_dropout=0.1),
    _family(
        "blenderbot",
        2,
        10240,
        32,
        counted=False,
        vocab_size=8008,
        d_model=2560,
        max_position_embeddings=128,
        decoder_layers=24,
    ),
    _family("blenderbot-small", 8, 2048, 16, counted=False, d_model=512, max_position_embeddings=512),
    _family("marian", vocab_size=58101),
    _family("m2m_100", vocab_size=128112, activation_function="relu", attention_dropout=0.1),
)
