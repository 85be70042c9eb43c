"""ModernBERT: a pre-norm encoder with rotary embedding, a gated MLP, and local attention in most layers."""

from __future__ import annotations

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.config.reader import Config
from memcalc.models.common.encoder import ClassificationHeadSpec, Encoded, EncoderRecipe, encoder
from memcalc.models.family import Family, sizes, table
from memcalc.nn.layers.attention_backends import attend
from memcalc.nn.layers.encoder_heads import Dropout, VocabularyHead
from memcalc.nn.layers.linear import Embedding, Linear
from memcalc.nn.layers.masks import bidirectional_mask
from memcalc.nn.layers.mlp import activation
from memcalc.nn.layers.norms import LayerNorm
from memcalc.nn.layers.rotary import RotaryByWindow, RotaryEmbedding, Rotation, rotary_in_fp32
from memcalc.nn.model import Network
from memcalc.nn.module import Module
from memcalc.nn.stack import Stack
from memcalc.tables.dtypes import BOOL, INT64


class Embeddings(Module):
    """dropout(norm(token embeddings))."""

    scope = "embedding"

    def __init__(self, c: Config, hidden: int) -> None:
        self.tok_embeddings = Embedding(c.integer("vocab_size"), hidden)
        self.norm = LayerNorm(hidden, bias=c.flag("norm_bias"))
        self.dropout = c.probability("embedding_dropout")

    def forward(self, ids: Tensor) -> Tensor:
        """Ids [b, s] to [b, s, h]."""
        return ops.dropout(self.norm(self.tok_embeddings(ids)), self.dropout)


class LocalAttention(Module):
    """Attention with one projection for query, key and value, rotary embedding, and a window or none."""

    scope = "attention"

    def __init__(self, c: Config, hidden: int) -> None:
        bias = c.flag("attention_bias")
        self.head_dim = c.head_dim()
        self.Wqkv = Linear(hidden, 3 * hidden, bias=bias, group="attention")
        self.Wo = Linear(hidden, hidden, bias=bias, group="attention")
        self.dropout = c.probability("attention_dropout")

    def forward(self, hidden: Tensor, rotation: Rotation, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """[b, s, h] to [b, s, h], and the probabilities where they exist."""
        qkv = self.Wqkv(hidden)
        qkv = ops.view(qkv, *hidden.shape[:-1], 3, -1, self.head_dim)
        query, key, value = ops.unbind(qkv, -3)
        query = ops.transpose(query, 1, 2)
        key = ops.transpose(key, 1, 2)
        value = ops.transpose(value, 1, 2)
        query, key = rotary_in_fp32(query, key, *rotation)
        out, weights = attend(query, key, value, mask, 1, self.dropout)
        out = ops.contiguous(ops.reshape(out, *hidden.shape[:-1], -1))
        out = ops.dropout(self.Wo(out), self.dropout)
        return out, weights


class GluMLP(Module):
    """Wo(dropout(act(first half) * second half)) of one projection Wi."""

    scope = "MLP"

    def __init__(self, c: Config, hidden: int) -> None:
        width, bias = c.integer("intermediate_size"), c.flag("mlp_bias")
        self.Wi = Linear(hidden, 2 * width, bias=bias, group="MLP")
        self.Wo = Linear(width, hidden, bias=bias, group="MLP")
        self.act = activation(c.text("hidden_activation"))
        self.dropout = c.probability("mlp_dropout")

    def forward(self, hidden: Tensor) -> Tensor:
        """[b, s, h] to [b, s, h]."""
        first, gate = ops.chunk(self.Wi(hidden), 2, -1)
        return self.Wo(ops.dropout(ops.mul(self.act(first), gate), self.dropout))


class ModernBertLayer(Module):
    """Norm, attention, add; norm, MLP, add. The first layer's input is normalised already."""

    scope = "residual stream"

    def __init__(self, c: Config, hidden: int, *, first: bool, window: int | None) -> None:
        bias = c.flag("norm_bias")
        self.attn_norm = None if first else LayerNorm(hidden, bias=bias)
        self.attn = LocalAttention(c, hidden)
        self.mlp_norm = LayerNorm(hidden, bias=bias)
        self.mlp = GluMLP(c, hidden)
        self.window = window

    def forward(self, hidden: Tensor, mask: Tensor | None, rotation: Rotation) -> Tensor:
        """[b, s, h] to [b, s, h]."""
        attended, _weights = self.attn(
            hidden if self.attn_norm is None else self.attn_norm(hidden), rotation=rotation, mask=mask
        )
        hidden = ops.add(hidden, attended)
        return ops.add(hidden, self.mlp(self.mlp_norm(hidden)))


class ModernBertModel(Module):
    """Embeddings, layers, final norm; a table of rotations for each kind of layer."""

    def __init__(self, c: Config, hidden: int) -> None:
        depth, local = c.integer("num_hidden_layers"), c.integer("local_attention")
        every = c.integer("global_attn_every_n_layers", 3)
        kinds = c.layer_types(["sliding_attention" if i % every else "full_attention" for i in range(depth)])
        windows = [local // 2 if kind == "sliding_attention" else None for kind in kinds]
        self.window = local // 2
        self.embeddings = Embeddings(c, hidden)
        self.layers = Stack(windows, lambda i: ModernBertLayer(c, hidden, first=i == 0, window=windows[i]))
        self.final_norm = LayerNorm(hidden, bias=c.flag("norm_bias"))
        self.rotary_emb = RotaryByWindow(list(dict.fromkeys(windows)), lambda: RotaryEmbedding(c.head_dim()))

    def forward(self, ids: Tensor, padding: bool) -> Encoded:
        """Ids [b, s] to hidden states [b, s, h]."""
        position_ids = ops.unsqueeze(ids.tape.empty((ids.shape[1],), INT64), 0)
        hidden = inputs_embeds = self.embeddings(ids)  # what masks are made from is kept to the end
        masks = {window: bidirectional_mask(inputs_embeds, padding, window=window) for window in (None, self.window)}
        rotations = self.rotary_emb(hidden, position_ids)
        for layer in self.layers:
            window = vars(layer.module)["window"]
            hidden = layer(hidden, mask=masks[window], rotation=rotations[window])
        hidden = self.final_norm(hidden)
        return hidden, None


class ScoreHead(Module):
    """norm(act(dense(x))) in front of the scores of tokens."""

    scope = "head and loss"

    def __init__(self, c: Config, hidden: int) -> None:
        self.dense = Linear(hidden, hidden, bias=c.flag("classifier_bias"), group="head")
        self.act = activation(c.text("classifier_activation"))
        self.norm = LayerNorm(hidden, bias=c.flag("norm_bias"))

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., h] to [..., h]."""
        return self.norm(self.act(self.dense(hidden)))


def _first_token(hidden: Tensor) -> tuple[Tensor, ...]:
    return (ops.select(hidden, 1),)


def _mean_of_tokens(hidden: Tensor) -> tuple[Tensor, ...]:
    """The mean over tokens [b, h] of hidden states [b, s, h], through a mask of ones, which stays."""
    mask = hidden.tape.empty(hidden.shape[:2], BOOL)
    total = ops.sum(ops.mul(hidden, ops.unsqueeze(mask, -1)), 1)
    return ops.div(total, hidden.tape.empty((hidden.shape[0], 1), INT64)), mask


def modernbert(c: Config, architecture: str | None) -> Network:
    """ModernBERT."""
    hidden, act, bias = c.integer("hidden_size"), c.text("classifier_activation"), c.flag("classifier_bias")
    norm_bias, dropout = c.flag("norm_bias"), c.probability("classifier_dropout")

    def vocabulary(body: Module) -> Module:
        return VocabularyHead(
            hidden,
            act,
            vars(body)["embeddings"].tok_embeddings,
            tied=c.flag("tie_word_embeddings"),
            own_bias=False,
            bias=bias,
            norm_bias=norm_bias,
            out_bias=c.flag("decoder_bias"),
        )

    def classifier() -> ClassificationHeadSpec:
        scores = Linear(hidden, c.num_labels(), bias=True, group="head")
        pool = _mean_of_tokens if c.text("classifier_pooling") == "mean" else _first_token
        return ClassificationHeadSpec(scores, (ScoreHead(c, hidden), Dropout(dropout)), pool=pool)

    return encoder(
        c,
        architecture,
        EncoderRecipe(
            body=lambda _pooler: ModernBertModel(c, hidden),
            vocabulary=vocabulary,
            classifier=classifier,
            fp32=True,
            front=lambda: ScoreHead(c, hidden),
            token_dropout=dropout,
            answer_dropout=dropout,
        ),
    )


FAMILIES = table(
    Family(
        "modernbert",
        modernbert,
        sizes(
            (50368, 768, 1152, 22, 12, 0, 0),
            hidden_activation="gelu",
            attention_dropout=0.0,
            local_attention=128,
            embedding_dropout=0.0,
            mlp_dropout=0.0,
            decoder_bias=True,
            classifier_pooling="cls",
            classifier_dropout=0.0,
            classifier_activation="gelu",
            tie_word_embeddings=True,
        ),
        blocks="encoder",
    )
)
