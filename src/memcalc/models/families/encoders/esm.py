"""ESM-2: an encoder of proteins that normalises first, with a rotary embedding or learned positions."""

from __future__ import annotations

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.config.reader import Config
from memcalc.errors import ConfigError
from memcalc.models.common.encoder import EncoderModel, roberta_like_encoder
from memcalc.models.family import Family, sizes, table
from memcalc.nn.layers.activations import gelu_of_erf
from memcalc.nn.layers.attention_backends import attend_same_dtype, split_heads
from memcalc.nn.layers.bert import DenseAdd, Pooler, count_tokens
from memcalc.nn.layers.linear import Embedding, Linear, PositionTable
from memcalc.nn.layers.masks import padding_input
from memcalc.nn.layers.norms import LayerNorm
from memcalc.nn.layers.rotary import Rotation, rotary_in_fp32
from memcalc.nn.model import Network
from memcalc.nn.module import Buffer, Module, Parameter
from memcalc.nn.stack import Stack
from memcalc.tables.dtypes import FP32, INT64


class EsmEmbeddings(Module):
    """Token embeddings, made larger to make up for masked ones, and learned positions where there is no rotation."""

    scope = "embedding"

    def __init__(self, c: Config, hidden: int, *, rotary: bool) -> None:
        longest = c.integer("max_position_embeddings")
        self.word_embeddings = Embedding(c.integer("vocab_size"), hidden)
        self.layer_norm = LayerNorm(hidden) if c.flag("emb_layer_norm_before") else None
        self.position_ids = Buffer(1, longest, dtype=INT64)
        offset = c.integer("pad_token_id", 0, minimum=0) + 1
        self.position_embeddings = None if rotary else PositionTable(longest, hidden, offset=offset)
        self.token_dropout = c.flag("token_dropout")

    def forward(self, ids: Tensor, padding: bool) -> Tensor:
        """Ids [b, s] to [b, s, h]; padding is blanked out."""
        mask = padding_input(ids) if padding else None
        position_ids = count_tokens(ids)
        inputs_embeds = self.word_embeddings(ids)
        embeddings: Tensor = inputs_embeds
        if self.token_dropout:
            embeddings = ops.masked_fill(embeddings, ops.unsqueeze(ops.compare(ids), -1))
            lengths = None if mask is None else ops.sum(mask)
            found = ops.compare(ids)
            count = ops.sum(found, dtype=INT64)
            del found
            observed = ops.to(count, FP32)
            del count
            observed = ops.mul_scalar(observed) if lengths is None else ops.div(observed, lengths)
            share = ops.unsqueeze(ops.unsqueeze(ops.add_scalar(observed), 1), 2)
            embeddings = ops.to(ops.div(ops.mul_scalar(embeddings), share), embeddings.dtype)
        if self.position_embeddings is not None:
            position_embeddings = self.position_embeddings(position_ids)
            embeddings = ops.add(embeddings, position_embeddings)
        if self.layer_norm is not None:
            embeddings = self.layer_norm(embeddings)
        if mask is not None:
            embeddings = ops.mul(embeddings, ops.unsqueeze(mask, -1))
        return embeddings


class EsmRotaryEmbedding(Module):
    """cos and sin [1, s, d] of the positions; the frequencies are a buffer of the checkpoint."""

    scope = "rotary embedding"

    def __init__(self, head_dim: int) -> None:
        self.inv_freq = Buffer(head_dim // 2, dtype=None)

    def forward(self, x: Tensor) -> Rotation:
        """The pair for states [b, s, h], in their dtype."""
        position_ids = ops.unsqueeze(x.tape.empty((x.shape[1],), INT64), 0)
        freqs = ops.mul(ops.to(ops.unsqueeze(position_ids, -1), FP32), ops.to(self.inv_freq, FP32))
        both = ops.cat((freqs, freqs), -1)
        cos = ops.mul_scalar(ops.cos(both))
        sin = ops.mul_scalar(ops.sin(both))
        return ops.to(cos, x.dtype), ops.to(sin, x.dtype)


class EsmSelfAttention(Module):
    """Attention over scaled queries."""

    scope = "attention"

    def __init__(self, c: Config, hidden: int) -> None:
        self.head_dim = hidden // c.divides("num_attention_heads", "hidden_size")
        self.query = Linear(hidden, hidden, bias=True, group="attention")
        self.key = Linear(hidden, hidden, bias=True, group="attention")
        self.value = Linear(hidden, hidden, bias=True, group="attention")
        self.dropout = c.probability("attention_probs_dropout_prob")

    def forward(self, hidden: Tensor, mask: Tensor | None, rotation: Rotation | None) -> tuple[Tensor, Tensor | None]:
        """[b, s, h] to [b, s, h], and the probabilities where they exist."""
        query = split_heads(self.query(hidden), self.head_dim)
        key = split_heads(self.key(hidden), self.head_dim)
        value = split_heads(self.value(hidden), self.head_dim)
        query = ops.mul_scalar(query)
        if rotation is not None:
            query, key = rotary_in_fp32(query, key, *rotation)
        out, weights = attend_same_dtype(query, key, value, mask, self.dropout, cast_back=False)
        return ops.contiguous(ops.reshape(out, *hidden.shape[:-1], -1)), weights


class EsmAttention(Module):
    """LayerNorm, attention, add."""

    scope = "attention"

    def __init__(self, c: Config, hidden: int) -> None:
        self.self = EsmSelfAttention(c, hidden)
        self.output = DenseAdd(hidden, hidden, c.probability("hidden_dropout_prob"), "attention")
        self.LayerNorm = LayerNorm(hidden)

    def forward(self, hidden: Tensor, mask: Tensor | None, rotation: Rotation | None) -> Tensor:
        """[b, s, h] to [b, s, h]."""
        normed = self.LayerNorm(hidden)
        out, _weights = self.self(normed, mask=mask, rotation=rotation)
        out = self.output(out, hidden)
        return out  # noqa: RET504


class ErfGelu(Module):
    """The exact GELU, written out, of dense(x)."""

    def __init__(self, inputs: int, outputs: int, group: str) -> None:
        self.dense = Linear(inputs, outputs, bias=True, group=group)

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., inputs] to [..., outputs]."""
        dense: Tensor = self.dense(hidden)
        del hidden
        return gelu_of_erf(dense)


class EsmLayer(Module):
    """LayerNorm, attention, add; LayerNorm, MLP, add."""

    scope = "MLP"

    def __init__(self, c: Config, hidden: int) -> None:
        width = c.integer("intermediate_size")
        self.attention = EsmAttention(c, hidden)
        self.intermediate = ErfGelu(hidden, width, "MLP")
        self.output = DenseAdd(width, hidden, c.probability("hidden_dropout_prob"), "MLP")
        self.LayerNorm = LayerNorm(hidden)

    def forward(self, hidden: Tensor, mask: Tensor | None, rotation: Rotation | None) -> Tensor:
        """[b, s, h] to [b, s, h]."""
        attended = self.attention(hidden, mask=mask, rotation=rotation)
        return self._feed_forward(attended)

    def _feed_forward(self, attended: Tensor) -> Tensor:
        normed = self.LayerNorm(attended)
        intermediate = self.intermediate(normed)
        return self.output(intermediate, attended)


class EsmEncoder(Module):
    """The stack of layers and a LayerNorm after it."""

    def __init__(self, layer: Stack, hidden: int, rotary: Module | None) -> None:
        self.rotary_embeddings = rotary
        self.layer = layer
        self.emb_layer_norm_after = LayerNorm(hidden)

    def forward(self, hidden: Tensor, mask: Tensor | None) -> Tensor:
        """[b, s, h] to [b, s, h]."""
        rotation = None if self.rotary_embeddings is None else self.rotary_embeddings(hidden)
        for layer in self.layer:
            hidden = layer(hidden, mask=mask, rotation=rotation)
        return self.emb_layer_norm_after(hidden)


class ContactHead(Module):
    """The regression from attention to contacts, which only its own method uses."""

    def __init__(self, maps: int) -> None:
        self.regression = Linear(maps, 1, bias=True, group="head")


class EsmLMHead(Module):
    """LayerNorm(gelu(dense(x))), the projection to the vocabulary, and a bias that is added to it."""

    scope = "head and loss"

    def __init__(self, hidden: int, embedding: Embedding, *, tied: bool) -> None:
        vocab = embedding.weight.shape[0]
        self.bias = Parameter(vocab, group="LM head")
        self.dense = Linear(hidden, hidden, bias=True, group="LM head")
        self.layer_norm = LayerNorm(hidden)
        self.decoder = Linear(hidden, vocab, group="LM head")
        if tied:
            self.decoder.weight = embedding.weight

    def forward(self, hidden: Tensor) -> Tensor:
        """[b, s, h] to logits [b, s, V]."""
        hidden = self.dense(hidden)
        hidden = gelu_of_erf(hidden)
        hidden = self.layer_norm(hidden)
        return ops.add(self.decoder(hidden), self.bias)


def esm(c: Config, architecture: str | None) -> Network:
    """ESM-1b and ESM-2."""
    hidden, dropout = c.integer("hidden_size"), c.probability("hidden_dropout_prob")
    kind = c.text("position_embedding_type")
    if kind not in ("rotary", "absolute"):
        raise ConfigError(f"{c.where} gives 'position_embedding_type' as {kind!r}; ESM has rotary and absolute.")
    depth, heads, rotary = c.integer("num_hidden_layers"), c.integer("num_attention_heads"), kind == "rotary"

    def body(pooler: bool) -> EncoderModel:
        turn = EsmRotaryEmbedding(hidden // c.divides("num_attention_heads", "hidden_size")) if rotary else None
        stack = Stack(["layer"] * depth, lambda _: EsmLayer(c, hidden))
        model = EncoderModel(
            EsmEmbeddings(c, hidden, rotary=rotary),
            EsmEncoder(stack, hidden, turn),
            pooler=Pooler(hidden) if pooler else None,
            blanked=True,
        )
        model.contact_head = ContactHead(depth * heads)  # type: ignore[attr-defined]
        return model

    def vocabulary(table: Embedding) -> Module:
        return EsmLMHead(hidden, table, tied=c.flag("tie_word_embeddings"))

    return roberta_like_encoder(c, architecture, dropout, body, vocabulary)


FAMILIES = table(
    Family(
        "esm",
        esm,
        sizes(
            (33, 768, 3072, 12, 12, 0, 1026),
            hidden_dropout_prob=0.1,
            attention_probs_dropout_prob=0.1,
            position_embedding_type="absolute",
            tie_word_embeddings=True,
        ),
        blocks="encoder",
        verified="measured rows",
    )
)
