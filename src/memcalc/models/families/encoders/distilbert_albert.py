"""Encoders made smaller than BERT: DistilBERT, and ALBERT (one block's weights for all)."""

from __future__ import annotations

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.config.reader import Config
from memcalc.errors import ConfigError
from memcalc.models.common.encoder import (
    ClassificationHeadSpec,
    Encoder,
    EncoderLM,
    EncoderModel,
    EncoderRecipe,
    encoder,
)
from memcalc.models.family import Family, llama_sizes, table
from memcalc.nn.layers.bert import EncoderEmbeddings, Pooler, SelfAttention
from memcalc.nn.layers.encoder_heads import Dropout, DropoutLinear, VocabularyHead
from memcalc.nn.layers.linear import Linear
from memcalc.nn.layers.mlp import PlainMLP
from memcalc.nn.layers.norms import LayerNorm
from memcalc.nn.model import Network
from memcalc.nn.module import Module
from memcalc.nn.stack import Stack


def _mlp(c: Config, names: tuple[str, str], *, dropout: float = 0.0) -> PlainMLP:
    hidden, width = c.integer("hidden_size"), c.integer("intermediate_size")
    return PlainMLP(hidden, width, c.text("hidden_act"), names=names, bias=True, dropout=dropout)


class DistilBlock(Module):
    """Attention with its output projection, add and LayerNorm; feed-forward, add and LayerNorm."""

    scope = "residual stream"

    def __init__(self, c: Config, hidden: int) -> None:
        self.attention = SelfAttention(c, ("q_lin", "k_lin", "v_lin"), "out_lin")
        self.sa_layer_norm = LayerNorm(hidden)
        self.ffn = _mlp(c, ("lin1", "lin2"), dropout=c.probability("hidden_dropout_prob"))
        self.output_layer_norm = LayerNorm(hidden)

    def forward(self, hidden: Tensor, mask: Tensor | None) -> Tensor:
        """[b, s, h] to [b, s, h]."""
        attended, _weights = self.attention(hidden, mask=mask)
        attended = self.sa_layer_norm(ops.add(attended, hidden))
        fed = self.ffn(attended)
        return self.output_layer_norm(ops.add(fed, attended))


def distilbert(c: Config, architecture: str | None) -> Network:
    """DistilBERT: BERT without token types and pooler, at half the depth."""
    hidden, dropout = c.integer("hidden_size"), c.probability("hidden_dropout_prob")

    def body(_pooler: bool) -> Module:
        stack = Stack(["layer"] * c.integer("num_hidden_layers"), lambda _: DistilBlock(c, hidden))
        return EncoderModel(EncoderEmbeddings(c, hidden, typed=False), Encoder(stack))

    def classifier() -> ClassificationHeadSpec:
        return ClassificationHeadSpec(
            Linear(hidden, c.num_labels(), bias=True, group="head"),
            (Pooler(hidden, "relu"), Dropout(c.probability("seq_classif_dropout"))),
        )

    return encoder(
        c,
        architecture,
        EncoderRecipe(
            body=body,
            vocabulary=lambda model: _vocabulary(c, model, own_bias=False),
            classifier=classifier,
            token_dropout=dropout,
            answer_dropout=c.probability("qa_dropout"),
        ),
    )


def _vocabulary(c: Config, body: Module, *, own_bias: bool = True, act: str | None = None) -> Module:
    table = vars(body)["embeddings"].word_embeddings
    act = act or c.text("hidden_act")
    return VocabularyHead(c.integer("hidden_size"), act, table, tied=c.flag("tie_word_embeddings"), own_bias=own_bias)


class AlbertLayer(Module):
    """Attention up to its LayerNorm, then feed-forward, add and LayerNorm."""

    scope = "residual stream"

    def __init__(self, c: Config, hidden: int) -> None:
        self.full_layer_layer_norm = LayerNorm(hidden)
        self.attention = SelfAttention(c, out="dense", norm=True)
        self.feed_forward = _mlp(c, ("ffn", "ffn_output"))

    def forward(self, hidden: Tensor, mask: Tensor | None) -> Tensor:
        """[b, s, h] to [b, s, h]."""
        attended, _weights = self.attention(hidden, mask)
        fed = self.feed_forward(attended)
        return self.full_layer_layer_norm(ops.add(fed, attended))


class AlbertGroup(Module):
    """Layers that run one after another and are used again and again."""

    supports_checkpointing = False

    def __init__(self, c: Config, hidden: int) -> None:
        self.albert_layers = [AlbertLayer(c, hidden) for _ in range(_inner_layers(c))]

    def forward(self, hidden: Tensor, mask: Tensor | None) -> Tensor:
        """[b, s, h] to [b, s, h]."""
        for layer in self.albert_layers:
            hidden = layer(hidden, mask)
        return hidden


def _inner_layers(c: Config) -> int:
    """Layers of a group, each of which is built."""
    count = c.integer("inner_group_num")
    if count > 1000:
        raise ConfigError(f"{c.where} gives 'inner_group_num' as {count}, more than any model has; correct it.")
    return count


def albert(c: Config, architecture: str | None) -> Network:
    """ALBERT: narrow embeddings, and layers that share the weights of their group."""
    hidden, width = c.integer("hidden_size"), c.integer("embedding_size")
    depth, groups = c.integer("num_hidden_layers"), c.integer("num_hidden_groups")
    if groups > depth:
        raise ConfigError(f"{c.where} has 'num_hidden_groups' {groups} but 'num_hidden_layers' {depth}; correct one.")

    def body(pooler: bool) -> Module:
        made = [AlbertGroup(c, hidden) for _ in range(groups)]
        kinds = ["layer"] * depth if groups == 1 else list(range(depth))
        stack = Stack(kinds, lambda layer: made[int(layer / (depth / groups))], shared=True)
        enter = Linear(width, hidden, bias=True, group="embedding")
        return EncoderModel(
            EncoderEmbeddings(c, width), Encoder(stack, enter), pooler=Pooler(hidden) if pooler else None
        )

    def head() -> Module:
        return DropoutLinear(hidden, c.num_labels(), c.probability("classifier_dropout_prob"))

    def classifier() -> ClassificationHeadSpec:
        scores = Linear(hidden, c.num_labels(), bias=True, group="head")
        return ClassificationHeadSpec(scores, (Dropout(c.probability("classifier_dropout_prob")),), pooled=True)

    def pretraining() -> Network:
        model = body(True)
        return EncoderLM(model, _vocabulary(c, model), pair=head())

    return encoder(
        c,
        architecture,
        EncoderRecipe(
            body=body,
            vocabulary=lambda model: _vocabulary(c, model),
            classifier=classifier,
            token_dropout=c.probability("classifier_dropout_prob"),
            extra={"ForPreTraining": pretraining},
        ),
    )


FAMILIES = table(
    Family(
        "distilbert",
        distilbert,
        llama_sizes(
            (30522, 768, 3072, 6, 12, 0, 512),
            hidden_dropout_prob=0.1,
            attention_probs_dropout_prob=0.1,
            hidden_act="gelu",
            qa_dropout=0.1,
            seq_classif_dropout=0.2,
            tie_word_embeddings=True,
        ),
        {
            "dim": "hidden_size",
            "n_heads": "num_attention_heads",
            "n_layers": "num_hidden_layers",
            "hidden_dim": "intermediate_size",
            "dropout": "hidden_dropout_prob",
            "activation": "hidden_act",
            "attention_dropout": "attention_probs_dropout_prob",
        },
        blocks="encoder",
    ),
    Family(
        "albert",
        albert,
        llama_sizes(
            (30000, 4096, 16384, 12, 64, 0, 512),
            embedding_size=128,
            num_hidden_groups=1,
            inner_group_num=1,
            hidden_act="gelu_new",
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            type_vocab_size=2,
            classifier_dropout_prob=0.1,
            tie_word_embeddings=True,
        ),
        blocks="encoder",
    ),
)
