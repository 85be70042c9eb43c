"""BERT with a rotary embedding in place of learned positions: nomic-embed, gte-multilingual, jina-embeddings-v3."""

from __future__ import annotations

from collections.abc import Callable

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.config.reader import Config
from memcalc.models.common.encoder import ClassificationHeadSpec, EncoderModel, EncoderRecipe, encoder
from memcalc.models.family import Family, sizes, table
from memcalc.nn.layers.bert import Pooler
from memcalc.nn.layers.encoder_heads import ClsTokenHead, Dropout, VocabularyHead
from memcalc.nn.layers.linear import Embedding, Linear
from memcalc.nn.layers.mlp import GatedMLP, PlainMLP
from memcalc.nn.layers.norms import LayerNorm
from memcalc.nn.layers.rotary import RotaryEmbedding, Rotation, apply_rotary
from memcalc.nn.layers.vision_transformer import VisionAttention
from memcalc.nn.model import Network
from memcalc.nn.module import Buffer, Module
from memcalc.nn.stack import Stack
from memcalc.tables.dtypes import INT64


class EmbeddingsWithoutPositions(Module):
    """Token and token-type embeddings, summed, normalised, dropped out; positions come in later.

    With `buffered`, position ids and token types that nothing uses are kept as buffers.
    """

    scope = "embedding"

    def __init__(self, c: Config, hidden: int, *, buffered: bool) -> None:
        self.word_embeddings = Embedding(c.integer("vocab_size"), hidden)
        if buffered:
            longest = c.integer("max_position_embeddings")
            self.position_ids = Buffer(1, longest, dtype=INT64)
            self.token_type_ids = Buffer(1, longest, dtype=INT64)
        types = c.integer("type_vocab_size", minimum=0)
        self.token_type_embeddings = Embedding(types, hidden) if types else None
        self.LayerNorm = LayerNorm(hidden)
        self.dropout = c.probability("hidden_dropout_prob")

    def forward(self, ids: Tensor) -> Tensor:
        """Ids [b, s] to [b, s, h]."""
        embeddings = self.word_embeddings(ids)
        if self.token_type_embeddings is not None:
            token_type_ids = ids.tape.empty(ids.shape, INT64)
            embeddings = ops.add(embeddings, self.token_type_embeddings(token_type_ids))
        embeddings = self.LayerNorm(embeddings)
        return ops.dropout(embeddings, self.dropout)


class RotaryLayer(Module):
    """Attention, add and LayerNorm; MLP, add and LayerNorm."""

    scope = "residual stream"

    def __init__(self, c: Config, hidden: int, mlp: Module, *, bias: bool) -> None:
        self.post_attention_layernorm = LayerNorm(hidden)
        self.mlp = mlp
        self.self_attn = VisionAttention(
            hidden,
            c.integer("num_attention_heads"),
            bias=bias,
            out_bias=bias,
            own_dtype=True,
            rotate=apply_rotary,
            dropout=c.probability("attention_probs_dropout_prob"),
        )
        self.post_mlp_layernorm = LayerNorm(hidden)
        self.dropout = c.probability("hidden_dropout_prob")

    def forward(
        self, hidden: Tensor, mask: Tensor | None, rotation: Rotation, position_ids: Tensor | None = None
    ) -> Tensor:
        """[b, s, h] to [b, s, h]; the position ids are only held."""
        residual = hidden
        attended, _weights = self.self_attn(hidden, mask=mask, rotation=rotation)
        hidden = ops.add(residual, ops.dropout(attended, self.dropout))
        hidden = self.post_attention_layernorm(hidden)
        residual = hidden
        hidden = self.mlp(hidden)
        hidden = ops.add(residual, ops.dropout(hidden, self.dropout))
        return self.post_mlp_layernorm(hidden)


class RotaryEncoder(Module):
    """The stack of layers and the rotary embedding; with `passed`, the layers get the position ids too."""

    def __init__(self, layers: Stack, head_dim: int, *, passed: bool) -> None:
        self.rotary_emb = RotaryEmbedding(head_dim)
        self.layers = layers
        self.passed = passed

    def forward(self, hidden: Tensor, mask: Tensor | None) -> Tensor:
        """[b, s, h] to [b, s, h]."""
        position_ids = ops.unsqueeze(hidden.tape.empty((hidden.shape[1],), INT64), 0)
        rotation = self.rotary_emb(hidden, position_ids)
        more = {"position_ids": position_ids} if self.passed else {}
        for layer in self.layers:
            hidden = layer(hidden, mask=mask, rotation=rotation, **more)
        return hidden


def _network(
    c: Config,
    architecture: str | None,
    mlp: Callable[[], Module],
    *,
    bias: bool = True,
    passed: bool = False,
    pooled: bool = True,
    bare_pooled: bool = True,
    act: str = "gelu",
    own_bias: bool = True,
    buffered: bool = False,
) -> Network:
    """The encoder with the head that `architecture` names; `act` is that of the vocabulary head.

    `pooled` says whether classifiers have a pooler, `bare_pooled` whether the model without a head has one.
    """
    bare = (architecture or "").endswith("Model")
    hidden = c.integer("hidden_size")
    dropout = c.probability("classifier_dropout", c.probability("hidden_dropout_prob"))
    head_dim = hidden // c.divides("num_attention_heads", "hidden_size")

    def body(pooler: bool) -> EncoderModel:
        layers = Stack(["layer"] * c.integer("num_hidden_layers"), lambda _: RotaryLayer(c, hidden, mlp(), bias=bias))
        stack = RotaryEncoder(layers, head_dim, passed=passed)
        embeddings = EmbeddingsWithoutPositions(c, hidden, buffered=buffered)
        return EncoderModel(embeddings, stack, pooler=Pooler(hidden) if pooler and (bare_pooled or not bare) else None)

    def vocabulary(model: Module) -> Module:
        table = vars(model)["embeddings"].word_embeddings
        return VocabularyHead(hidden, act, table, tied=c.flag("tie_word_embeddings"), own_bias=own_bias)

    def classifier() -> ClassificationHeadSpec:
        if not pooled:
            return ClassificationHeadSpec(ClsTokenHead(hidden, c.num_labels(), "tanh", dropout))
        scores = Linear(hidden, c.num_labels(), bias=True, group="head")
        return ClassificationHeadSpec(scores, (Dropout(dropout),), pooled=True)

    return encoder(
        c, architecture, EncoderRecipe(body=body, vocabulary=vocabulary, classifier=classifier, token_dropout=dropout)
    )


def nomic_bert(c: Config, architecture: str | None) -> Network:
    """nomic-embed: no biases in the blocks, SwiGLU."""
    hidden, width, act = c.integer("hidden_size"), c.integer("intermediate_size"), c.text("hidden_act")
    return _network(
        c,
        architecture,
        lambda: GatedMLP(hidden, width, act),
        bias=False,
        passed=True,
        act=act,
        buffered=True,
        bare_pooled=False,
    )


class GteMLP(GatedMLP):
    """A gated MLP with a bias on the way down alone, and dropout before it."""

    def __init__(self, hidden: int, width: int, act: str, dropout: float) -> None:
        super().__init__(hidden, width, act, inner_dropout=dropout)
        self.down_proj = Linear(width, hidden, bias=True, group="MLP")

    def forward(self, x: Tensor) -> Tensor:
        """[b, s, h] to [b, s, h]."""
        inner = ops.mul(self.act(self.gate_proj(x)), self.up_proj(x))
        inner = ops.dropout(inner, self.inner_dropout)
        return self.down_proj(inner)


def gte(c: Config, architecture: str | None) -> Network:
    """gte-multilingual."""
    hidden, width, act = c.integer("hidden_size"), c.integer("intermediate_size"), c.text("hidden_act")
    dropout = c.probability("hidden_dropout_prob")
    return _network(c, architecture, lambda: GteMLP(hidden, width, act, dropout), own_bias=False)


def jina(c: Config, architecture: str | None) -> Network:
    """jina-embeddings-v3, without the adapters of its tasks."""
    hidden, width, act = c.integer("hidden_size"), c.integer("intermediate_size"), c.text("hidden_act")
    return _network(
        c,
        architecture,
        lambda: PlainMLP(hidden, width, act, names=("fc1", "fc2"), bias=True),
        pooled=False,
        buffered=True,
    )


_SHARED = sizes(
    (0, 768, 3072, 12, 12, 0, 2048), hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.0, tie_word_embeddings=True
)

FAMILIES = table(
    Family(
        "nomic_bert",
        nomic_bert,
        _SHARED | {"vocab_size": 30528, "hidden_act": "silu", "hidden_dropout_prob": 0.0, "type_vocab_size": 2},
        blocks="encoder",
        verified="measured rows",
    ),
    Family(
        "gte",
        gte,
        _SHARED | {"vocab_size": 250048, "hidden_act": "gelu", "type_vocab_size": 1},
        blocks="encoder",
        verified="measured rows",
    ),
    Family(
        "jina_embeddings_v3",
        jina,
        _SHARED
        | sizes(
            (250002, 1024, 4096, 24, 16, 0, 8194),
            hidden_act="gelu",
            attention_probs_dropout_prob=0.1,
            type_vocab_size=1,
        ),
        blocks="encoder",
        verified="measured rows",
    ),
)
