"""MPNet: RoBERTa with a bias for relative positions, in eager attention only."""

from __future__ import annotations

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.config.reader import Config
from memcalc.errors import ConfigError
from memcalc.models.common.encoder import EncoderModel, roberta_like_encoder
from memcalc.models.family import Family, llama_sizes, table
from memcalc.nn.layers.attention_backends import split_heads
from memcalc.nn.layers.bert import DenseActivation, DenseAddNorm, EncoderEmbeddings, Pooler
from memcalc.nn.layers.encoder_heads import VocabularyHead
from memcalc.nn.layers.linear import Embedding, Linear
from memcalc.nn.layers.norms import LayerNorm
from memcalc.nn.model import Network
from memcalc.nn.module import Module
from memcalc.nn.stack import Stack
from memcalc.tables.dtypes import FP32, INT64


class MPNetAttention(Module):
    """Eager attention with a bias on the scores for the distance of two tokens, which all layers share."""

    scope = "attention"

    def __init__(self, c: Config, hidden: int) -> None:
        heads = c.integer("num_attention_heads")
        if hidden % heads:
            raise ConfigError(
                f"{c.where} has 'hidden_size' {hidden}, which 'num_attention_heads' {heads} does not divide."
            )
        self.head_dim = hidden // heads
        self.q = Linear(hidden, hidden, bias=True, group="attention")
        self.k = Linear(hidden, hidden, bias=True, group="attention")
        self.v = Linear(hidden, hidden, bias=True, group="attention")
        self.o = Linear(hidden, hidden, bias=True, group="attention")
        self.dropout = c.probability("attention_probs_dropout_prob")

    def forward(self, hidden: Tensor, mask: Tensor | None, bias: Tensor) -> Tensor:
        """[b, s, h] to [b, s, h]; `bias` is [b, heads, s, s]."""
        query = split_heads(self.q(hidden), self.head_dim)
        key = split_heads(self.k(hidden), self.head_dim)
        value = split_heads(self.v(hidden), self.head_dim)
        scores = ops.matmul(query, ops.transpose(key, -1, -2))
        scores = ops.mul_scalar(scores)
        scores = ops.add_(scores, bias)
        if mask is not None:
            scores = ops.add(scores, mask)
        probs = ops.softmax(scores)
        probs = ops.dropout(probs, self.dropout)
        out = ops.matmul(probs, value)
        out = ops.contiguous(ops.permute(out, 0, 2, 1, 3))
        out = ops.view(out, *out.shape[:-2], -1)
        return self.o(out)


class MPNetSelfAttention(Module):
    """LayerNorm(dropout(attention) + residual)."""

    scope = "attention"

    def __init__(self, c: Config, hidden: int) -> None:
        self.attn = MPNetAttention(c, hidden)
        self.LayerNorm = LayerNorm(hidden)
        self.dropout = c.probability("hidden_dropout_prob")

    def forward(self, hidden: Tensor, mask: Tensor | None, bias: Tensor) -> Tensor:
        """[b, s, h] to [b, s, h]."""
        attended = self.attn(hidden, mask, bias)
        return self.LayerNorm(ops.add(ops.dropout(attended, self.dropout), hidden))


class MPNetLayer(Module):
    """Attention and BERT's MLP."""

    scope = "MLP"
    supports_checkpointing = False

    def __init__(self, c: Config, hidden: int) -> None:
        width = c.integer("intermediate_size")
        self.attention = MPNetSelfAttention(c, hidden)
        self.intermediate = DenseActivation(hidden, width, c.text("hidden_act"), "MLP")
        self.output = DenseAddNorm(width, hidden, c.probability("hidden_dropout_prob"), "MLP")

    def forward(self, hidden: Tensor, mask: Tensor | None, bias: Tensor) -> Tensor:
        """[b, s, h] to [b, s, h]."""
        attended = self.attention(hidden, mask, bias=bias)
        intermediate = self.intermediate(attended)
        return self.output(intermediate, attended)


class MPNetEncoder(Module):
    """The stack of layers and the table of biases by distance."""

    def __init__(self, c: Config, hidden: int) -> None:
        depth = c.integer("num_hidden_layers")
        self.layer = Stack(["layer"] * depth, lambda _: MPNetLayer(c, hidden))
        buckets, heads = c.integer("relative_attention_num_buckets"), c.integer("num_attention_heads")
        self.relative_attention_bias = Embedding(buckets, heads, group="attention")

    def forward(self, hidden: Tensor, mask: Tensor | None) -> Tensor:
        """[b, s, h] to [b, s, h]."""
        bias = self._bias(hidden)
        for layer in self.layer:
            hidden = layer(hidden, mask, bias)
        return hidden

    def _bias(self, hidden: Tensor) -> Tensor:
        """The bias [b, heads, s, s], a copy for every sequence."""
        batch, length = hidden.shape[0], hidden.shape[1]
        first = ops.unsqueeze(hidden.tape.empty((length,), INT64), 1)
        second = ops.unsqueeze(hidden.tape.empty((length,), INT64), 0)
        distance = ops.sub(second, first)
        bucket = _buckets(distance)
        values = self.relative_attention_bias(bucket)
        values = ops.unsqueeze(ops.permute(values, 2, 0, 1), 0)
        return ops.contiguous(ops.expand(values, batch, -1, length, length))


def _buckets(distance: Tensor) -> Tensor:
    """The bucket of each distance [s, s]: half for each sign, close ones exact, far ones by logarithm."""
    n = ops.neg(distance)
    bucket = ops.add_scalar(ops.mul_scalar(ops.to(ops.compare(n), INT64)))
    n = ops.empty_like(n)
    near = ops.compare(n)
    far = ops.add_scalar(ops.to(ops.mul_scalar(ops.mul_scalar(ops.log(ops.mul_scalar(ops.to(n, FP32))))), INT64))
    far = ops.add(far, ops.empty_like(far))
    return ops.add_(bucket, ops.where(near, far))


def mpnet(c: Config, architecture: str | None) -> Network:
    """MPNet: RoBERTa with relative positions, in eager attention only."""
    hidden, dropout = c.integer("hidden_size"), c.probability("hidden_dropout_prob")

    def body(pooler: bool) -> Module:
        return EncoderModel(
            EncoderEmbeddings(c, hidden, typed=False, counted=True),
            MPNetEncoder(c, hidden),
            pooler=Pooler(hidden) if pooler else None,
        )

    def vocabulary(table: Embedding) -> Module:
        return VocabularyHead(hidden, "gelu", table, tied=c.flag("tie_word_embeddings"))

    return roberta_like_encoder(c, architecture, dropout, body, vocabulary)


FAMILIES = table(
    Family(
        "mpnet",
        mpnet,
        llama_sizes(
            (30527, 768, 3072, 12, 12, 0, 512),
            hidden_act="gelu",
            hidden_dropout_prob=0.1,
            attention_probs_dropout_prob=0.1,
            relative_attention_num_buckets=32,
            tie_word_embeddings=True,
        ),
        blocks="encoder",
        attention="eager",
    )
)
