"""BERT and its relatives: learned positions, LayerNorm after each sublayer, dropout, a layer for every position."""

from __future__ import annotations

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.config.reader import Config
from memcalc.models.common.encoder import (
    ClassificationHeadSpec,
    Encoder,
    EncoderLM,
    EncoderModel,
    EncoderRecipe,
    encoder,
)
from memcalc.models.family import Family, llama_sizes, table
from memcalc.nn.layers.bert import DenseActivation, DenseAddNorm, EncoderEmbeddings, Pooler, SelfAttention
from memcalc.nn.layers.encoder_heads import ClsTokenHead, Dropout, VocabularyHead
from memcalc.nn.layers.linear import Linear
from memcalc.nn.model import Batch, Network, Outputs
from memcalc.nn.module import Module
from memcalc.nn.stack import Stack
from memcalc.tables.dtypes import FP32


class BertAttention(Module):
    """Self-attention and its output."""

    scope = "attention"

    def __init__(self, c: Config, hidden: int) -> None:
        self.self = SelfAttention(c)
        self.output = DenseAddNorm(hidden, hidden, c.probability("hidden_dropout_prob"), "attention")

    def forward(self, hidden: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """[b, s, h] to [b, s, h]."""
        out, weights = self.self(hidden, mask=mask)
        out = self.output(out, hidden)
        return out, weights


class BertLayer(Module):
    """Attention, then MLP, each followed by add and LayerNorm."""

    scope = "MLP"

    def __init__(self, c: Config, hidden: int) -> None:
        width = c.integer("intermediate_size")
        self.attention = BertAttention(c, hidden)
        self.intermediate = DenseActivation(hidden, width, c.text("hidden_act"), "MLP")
        self.output = DenseAddNorm(width, hidden, c.probability("hidden_dropout_prob"), "MLP")

    def forward(self, hidden: Tensor, mask: Tensor | None) -> Tensor:
        """[b, s, h] to [b, s, h]."""
        attended, _weights = self.attention(hidden, mask)
        return self._feed_forward(attended)

    def _feed_forward(self, attended: Tensor) -> Tensor:
        intermediate = self.intermediate(attended)
        return self.output(intermediate, attended)


def _model(c: Config, *, pooler: bool, counted: bool = False, width: int | None = None) -> EncoderModel:
    """The bare encoder; embeddings of a `width` of their own are projected."""
    hidden = c.integer("hidden_size")
    width = hidden if width is None else width
    stack = Stack(["layer"] * c.integer("num_hidden_layers"), lambda _: BertLayer(c, hidden))
    return EncoderModel(
        EncoderEmbeddings(c, width, counted=counted),
        Encoder(stack),
        pooler=Pooler(hidden) if pooler else None,
        project=None if width == hidden else Linear(width, hidden, bias=True, group="embedding"),
        causal=c.flag("is_decoder"),
    )


def _head_dropout(c: Config) -> float:
    return c.probability("classifier_dropout", c.probability("hidden_dropout_prob"))


def _vocabulary(c: Config, act: str, body: Module, *, own_bias: bool = True) -> Module:
    table = vars(body)["embeddings"].word_embeddings
    return VocabularyHead(c.integer("hidden_size"), act, table, tied=c.flag("tie_word_embeddings"), own_bias=own_bias)


def _scores(c: Config) -> Module:
    return Linear(c.integer("hidden_size"), c.num_labels(), bias=True, group="head")


def bert(c: Config, architecture: str | None) -> Network:
    """BERT, what calls itself bert (MiniLM, bge, gte, arctic-embed), and ERNIE."""
    hidden = c.integer("hidden_size")

    def pretraining() -> Network:
        body = _model(c, pooler=True)
        pair = Linear(hidden, 2, bias=True, group="head")
        return EncoderLM(body, _vocabulary(c, c.text("hidden_act"), body), pair=pair)

    return encoder(
        c,
        architecture,
        EncoderRecipe(
            body=lambda pooler: _model(c, pooler=pooler),
            vocabulary=lambda body: _vocabulary(c, c.text("hidden_act"), body),
            classifier=lambda: ClassificationHeadSpec(_scores(c), (Dropout(_head_dropout(c)),), pooled=True),
            token_dropout=_head_dropout(c),
            extra={"ForPreTraining": pretraining},
        ),
    )


def roberta(c: Config, architecture: str | None) -> Network:
    """RoBERTa, XLM-RoBERTa, CamemBERT and data2vec: positions count the tokens that are no padding."""
    hidden, dropout = c.integer("hidden_size"), _head_dropout(c)
    return encoder(
        c,
        architecture,
        EncoderRecipe(
            body=lambda pooler: _model(c, pooler=pooler, counted=True),
            vocabulary=lambda body: _vocabulary(c, "gelu", body),
            classifier=lambda: ClassificationHeadSpec(ClsTokenHead(hidden, c.num_labels(), "tanh", dropout)),
            token_dropout=dropout,
        ),
    )


class ElectraDiscriminator(Network):
    """ELECTRA's pre-training: one score per token, whether it was replaced."""

    def __init__(self, c: Config, model: Module, hidden: int) -> None:
        self.model = model
        self.dense = DenseActivation(hidden, hidden, c.text("hidden_act"), "head")
        self.dense_prediction = Linear(hidden, 1, bias=True, group="head")

    def forward(self, batch: Batch) -> Outputs:
        """Loss and logits [b, s]."""
        outputs = self.model(batch.ids, batch.padding)
        with batch.ids.tape.scoped("head and loss"):
            logits = self._scores(outputs[0])
            if batch.labels is None:
                return Outputs(None, (logits,))
            return Outputs(_replaced_loss(logits, batch.token_labels()), (logits,))

    def _scores(self, hidden: Tensor) -> Tensor:
        hidden = self.dense(hidden)
        return ops.squeeze(self.dense_prediction(hidden), -1)


def _replaced_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return ops.binary_cross_entropy_with_logits(ops.view(logits, -1, logits.shape[1]), ops.to(labels, FP32))


def electra(c: Config, architecture: str | None) -> Network:
    """ELECTRA: BERT with narrow embeddings, trained to find replaced tokens."""
    hidden, dropout = c.integer("hidden_size"), _head_dropout(c)
    width = c.integer("embedding_size")

    def body(_pooler: bool) -> EncoderModel:
        return _model(c, pooler=False, width=width)

    return encoder(
        c,
        architecture,
        EncoderRecipe(
            body=body,
            vocabulary=lambda model: _vocabulary(c, "gelu", model, own_bias=False),
            classifier=lambda: ClassificationHeadSpec(ClsTokenHead(hidden, c.num_labels(), "gelu", dropout)),
            token_dropout=dropout,
            extra={"ForPreTraining": lambda: ElectraDiscriminator(c, body(False), hidden)},
        ),
    )


_BASE = llama_sizes(
    (30522, 768, 3072, 12, 12, 0, 512),
    hidden_act="gelu",
    hidden_dropout_prob=0.1,
    attention_probs_dropout_prob=0.1,
    type_vocab_size=2,
    tie_word_embeddings=True,
)

FAMILIES = table(
    Family("bert", bert, _BASE, blocks="encoder"),
    Family("roberta", roberta, _BASE | {"vocab_size": 50265}, blocks="encoder"),
    Family("xlm-roberta", roberta, _BASE, blocks="encoder"),
    Family("camembert", roberta, _BASE, blocks="encoder"),
    Family("data2vec-text", roberta, _BASE, blocks="encoder", verified="measured rows"),
    Family(
        "ernie",
        bert,
        _BASE | {"vocab_size": 30522, "use_task_id": False, "task_type_vocab_size": 3},
        blocks="encoder",
        verified="measured rows",
    ),
    Family(
        "electra",
        electra,
        _BASE | {"embedding_size": 128, "hidden_size": 256, "num_attention_heads": 4, "intermediate_size": 1024},
        blocks="encoder",
    ),
)
