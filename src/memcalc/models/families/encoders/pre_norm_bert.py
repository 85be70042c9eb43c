"""RoBERTa with the LayerNorm in front of each sublayer: XLM-RoBERTa-XL and RoBERTa-PreLayerNorm."""

from __future__ import annotations

from memcalc.autograd.tensor import Tensor
from memcalc.config.reader import Config
from memcalc.models.common.encoder import EncoderModel, roberta_like_encoder
from memcalc.models.family import Family, llama_sizes, sizes, table
from memcalc.nn.layers.bert import DenseActivation, DenseAdd, EncoderEmbeddings, Pooler, SelfAttention
from memcalc.nn.layers.encoder_heads import VocabularyHead
from memcalc.nn.layers.linear import Embedding
from memcalc.nn.layers.norms import LayerNorm
from memcalc.nn.model import Network
from memcalc.nn.module import Module
from memcalc.nn.stack import Stack


class PreNormAttention(Module):
    """LayerNorm, attention, add."""

    scope = "attention"

    def __init__(self, c: Config, hidden: int) -> None:
        self.self = SelfAttention(c)
        self.output = DenseAdd(hidden, hidden, c.probability("hidden_dropout_prob"), "attention")
        self.LayerNorm = LayerNorm(hidden)

    def forward(self, hidden: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """[b, s, h] to [b, s, h], and the probabilities where they exist."""
        normed = self.LayerNorm(hidden)
        out, weights = self.self(normed, mask=mask)
        out = self.output(out, hidden)
        return out, weights


class PreNormDense(Module):
    """act(dense(LayerNorm(x)))."""

    def __init__(self, hidden: int, width: int, act: str) -> None:
        self.LayerNorm = LayerNorm(hidden)
        self.inner = DenseActivation(hidden, width, act, "MLP")

    def forward(self, hidden: Tensor) -> Tensor:
        """[b, s, h] to [b, s, width]."""
        hidden = self.LayerNorm(hidden)
        hidden = self.inner.dense(hidden)
        return self.inner.act(hidden)


class PreNormLayer(Module):
    """LayerNorm, attention, add; LayerNorm, MLP, add. With `within`, the second norm is a part of the MLP."""

    scope = "MLP"

    def __init__(self, c: Config, hidden: int, *, within: bool) -> None:
        width, act = c.integer("intermediate_size"), c.text("hidden_act")
        self.attention = PreNormAttention(c, hidden)
        self.intermediate = PreNormDense(hidden, width, act) if within else DenseActivation(hidden, width, act, "MLP")
        dropout = c.probability("hidden_dropout_prob") if within else 0.0
        self.output = DenseAdd(width, hidden, dropout, "MLP")
        self.LayerNorm = None if within else LayerNorm(hidden)

    def forward(self, hidden: Tensor, mask: Tensor | None) -> Tensor:
        """[b, s, h] to [b, s, h]."""
        attended, _weights = self.attention(hidden, mask)
        return self._feed_forward(attended)

    def _feed_forward(self, attended: Tensor) -> Tensor:
        intermediate = attended if self.LayerNorm is None else self.LayerNorm(attended)
        intermediate = self.intermediate(intermediate)
        return self.output(intermediate, attended)


class PreNormEncoder(Module):
    """The stack of layers, and a LayerNorm after it."""

    def __init__(self, c: Config, hidden: int, *, within: bool) -> None:
        depth = c.integer("num_hidden_layers")
        self.layer = Stack(["layer"] * depth, lambda _: PreNormLayer(c, hidden, within=within))
        self.LayerNorm = LayerNorm(hidden)

    def forward(self, hidden: Tensor, mask: Tensor | None) -> Tensor:
        """[b, s, h] to [b, s, h]."""
        for layer in self.layer:
            hidden = layer(hidden, mask)
        return self.LayerNorm(hidden)


def _network(c: Config, architecture: str | None, *, within: bool) -> Network:
    hidden = c.integer("hidden_size")
    dropout = c.probability("classifier_dropout", c.probability("hidden_dropout_prob"))

    def body(pooler: bool) -> EncoderModel:
        return EncoderModel(
            EncoderEmbeddings(c, hidden, counted=True, normed=within),
            PreNormEncoder(c, hidden, within=within),
            pooler=Pooler(hidden) if pooler else None,
            causal=c.flag("is_decoder"),
        )

    def vocabulary(table: Embedding) -> Module:
        return VocabularyHead(hidden, "gelu", table, tied=c.flag("tie_word_embeddings"))

    return roberta_like_encoder(c, architecture, dropout, body, vocabulary)


def xlm_roberta_xl(c: Config, architecture: str | None) -> Network:
    """XLM-RoBERTa-XL and XXL."""
    return _network(c, architecture, within=False)


def roberta_prelayernorm(c: Config, architecture: str | None) -> Network:
    """RoBERTa-PreLayerNorm."""
    return _network(c, architecture, within=True)


_DEFAULTS = llama_sizes(
    (50265, 768, 3072, 12, 12, 0, 512),
    hidden_act="gelu",
    hidden_dropout_prob=0.1,
    attention_probs_dropout_prob=0.1,
    type_vocab_size=2,
    tie_word_embeddings=True,
)
_XL = sizes((250880, 2560, 10240, 36, 32, 0, 514), type_vocab_size=1)

FAMILIES = table(
    Family("xlm-roberta-xl", xlm_roberta_xl, _DEFAULTS | _XL, blocks="encoder", verified="measured rows"),
    Family("roberta-prelayernorm", roberta_prelayernorm, _DEFAULTS, blocks="encoder", verified="measured rows"),
)
