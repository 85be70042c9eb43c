"""DeBERTa v2 and v3: BERT with disentangled attention."""

from __future__ import annotations

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.config.reader import Config
from memcalc.models.common.encoder import ClassificationHeadSpec, Encoded, EncoderRecipe, encoder
from memcalc.models.family import Family, llama_sizes, table
from memcalc.nn.layers.bert import DenseActivation, DenseAddNorm
from memcalc.nn.layers.disentangled_attention import DisentangledAttention, Positions, distances
from memcalc.nn.layers.encoder_heads import Dropout, VocabularyHead
from memcalc.nn.layers.linear import Embedding, Linear, PositionTable
from memcalc.nn.layers.masks import padding_input
from memcalc.nn.layers.mlp import activation
from memcalc.nn.layers.norms import LayerNorm
from memcalc.nn.model import Network
from memcalc.nn.module import Buffer, Module, Parameter
from memcalc.nn.stack import Stack
from memcalc.tables.dtypes import BOOL, FP32, INT64


class DebertaEmbeddings(Module):
    """Token embeddings, those of position and type where they are, normalised, masked, dropped out."""

    scope = "embedding"

    def __init__(self, c: Config, hidden: int) -> None:
        width, longest = c.integer("embedding_size", hidden), c.integer("max_position_embeddings")
        types = c.integer("type_vocab_size", minimum=0)
        self.word_embeddings = Embedding(c.integer("vocab_size"), width)
        self.position_embeddings = PositionTable(longest, width) if c.flag("position_biased_input") else None
        self.token_type_embeddings = Embedding(types, width) if types else None
        self.embed_proj = None if width == hidden else Linear(width, hidden, group="embedding")
        self.LayerNorm = LayerNorm(hidden)
        self.dropout = c.probability("hidden_dropout_prob")
        self.position_ids = Buffer(1, longest, dtype=INT64)

    def forward(self, ids: Tensor, types: Tensor, mask: Tensor) -> Tensor:
        """Ids, token types and mask [b, s] to [b, s, h]."""
        position_ids = ops.narrow(self.position_ids, 1, ids.shape[1])
        inputs_embeds = self.word_embeddings(ids)
        if self.position_embeddings is not None:
            position_embeddings = self.position_embeddings(position_ids)
        else:
            position_embeddings = ops.empty_like(inputs_embeds)
        embeddings = inputs_embeds
        if self.position_embeddings is not None:
            embeddings = ops.add(embeddings, position_embeddings)
        if self.token_type_embeddings is not None:
            token_type_embeddings = self.token_type_embeddings(types)
            embeddings = ops.add(embeddings, token_type_embeddings)
        if self.embed_proj is not None:
            embeddings = self.embed_proj(embeddings)
        embeddings = self.LayerNorm(embeddings)
        mask = ops.unsqueeze(mask, 2)
        mask = ops.to(mask, embeddings.dtype)
        embeddings = ops.mul(embeddings, mask)
        return ops.dropout(embeddings, self.dropout)


class DebertaAttention(Module):
    """Attention and its output."""

    scope = "attention"

    def __init__(self, c: Config, hidden: int, at: Positions) -> None:
        self.self = DisentangledAttention(c, hidden, at)
        self.output = DenseAddNorm(hidden, hidden, c.probability("hidden_dropout_prob"), "attention")

    def forward(
        self, hidden: Tensor, mask: Tensor, relative: Tensor | None, table: Tensor | None
    ) -> tuple[Tensor, None]:
        """[b, s, h] to [b, s, h]."""
        attended, weights = self.self(hidden, mask, relative=relative, table=table)
        out = self.output(attended, hidden)
        return out, weights


class DebertaLayer(Module):
    """Attention, then MLP, each followed by add and LayerNorm."""

    scope = "MLP"

    def __init__(self, c: Config, hidden: int, at: Positions) -> None:
        width, dropout = c.integer("intermediate_size"), c.probability("hidden_dropout_prob")
        self.attention = DebertaAttention(c, hidden, at)
        self.intermediate = DenseActivation(hidden, width, c.text("hidden_act"), "MLP")
        self.output = DenseAddNorm(width, hidden, dropout, "MLP")

    def forward(
        self, hidden: Tensor, mask: Tensor, relative: Tensor | None, table: Tensor | None
    ) -> tuple[Tensor, None]:
        """[b, s, h] to [b, s, h]."""
        attended, weights = self.attention(hidden, mask, relative=relative, table=table)
        intermediate = self.intermediate(attended)
        out = self.output(intermediate, attended)
        return out, weights


class ConvolutionLayer(Module):
    """LayerNorm(output of the first block + act(dropout(convolution of the embeddings))), masked."""

    scope = "MLP"

    def __init__(self, c: Config, hidden: int) -> None:
        width, groups = c.integer("conv_kernel_size"), c.integer("conv_groups", 1)
        self.weight = Parameter(hidden, hidden // groups, width, group="MLP")
        self.bias = Parameter(hidden, group="MLP")
        self.LayerNorm = LayerNorm(hidden)
        self.act = activation(c.text("conv_act", "tanh"))
        self.dropout = c.probability("hidden_dropout_prob")
        self.padding = (width - 1) // 2

    def forward(self, hidden: Tensor, residual: Tensor, mask: Tensor) -> Tensor:
        """Embeddings and block output [b, s, h], mask [b, s] to [b, s, h]."""
        flipped = ops.contiguous(ops.permute(hidden, 0, 2, 1))
        out = ops.contiguous(ops.permute(ops.conv1d(flipped, self.weight, self.bias, self.padding), 0, 2, 1))
        del flipped
        hole = ops.to(ops.add_scalar(mask), BOOL)
        out = ops.masked_fill_(out, ops.expand(ops.unsqueeze(hole, -1), *out.shape))
        out = self.act(ops.dropout(out, self.dropout))
        joined = ops.add(residual, out)
        output = self.LayerNorm(joined)
        mask = ops.to(ops.unsqueeze(mask, 2), output.dtype)
        return ops.mul(output, mask)


class DebertaEncoder(Module):
    """The stack of layers; the embeddings of distances that all of them use; all their outputs live until the end."""

    def __init__(self, c: Config, hidden: int) -> None:
        at = self.at = Positions(c)
        convolves = c.integer("conv_kernel_size", 0, minimum=0) > 0
        # Work between two layers counts with the second: the layer after the convolution has a kind of its own.
        kinds = [
            "convolution" if convolves and layer == 1 else "layer" for layer in range(c.integer("num_hidden_layers"))
        ]
        self.layer = Stack(kinds, lambda _: DebertaLayer(c, hidden, at))
        self.rel_embeddings = Embedding(2 * at.span, hidden, group="attention") if at.relative else None
        self.LayerNorm = LayerNorm(hidden) if at.normed else None
        self.conv = ConvolutionLayer(c, hidden) if convolves else None

    def forward(self, hidden: Tensor, mask: Tensor) -> list[Tensor]:
        """[b, s, h] and mask [b, s] to the embeddings and the output of every layer."""
        input_mask = mask
        mask = ops.unsqueeze(ops.unsqueeze(mask, 1), 2)
        mask = ops.mul(mask, ops.unsqueeze(ops.squeeze(mask, -2), -1))
        relative = distances(hidden, self.at) if self.at.relative else None
        states = [hidden]
        following = hidden
        table: Tensor | None = None if self.rel_embeddings is None else self.rel_embeddings.weight
        if table is not None and self.LayerNorm is not None:
            table = self.LayerNorm(table)
        for index, layer in enumerate(self.layer):
            out, _weights = layer(following, mask, relative=relative, table=table)
            if index == 0 and self.conv is not None:
                out = self.conv(hidden, out, input_mask)
            states = [*states, out]
            following = out
        hidden.tape.allocate(0)  # a sample after the last layer: its input does not die with it
        return states


class DebertaModel(Module):
    """Embeddings and encoder. Without padding it makes a mask of ones."""

    def __init__(self, c: Config) -> None:
        hidden = c.integer("hidden_size")
        self.embeddings = DebertaEmbeddings(c, hidden)
        self.encoder = DebertaEncoder(c, hidden)

    def forward(self, ids: Tensor, padding: bool) -> Encoded:
        """Ids [b, s] to hidden states [b, s, h]."""
        tape = ids.tape
        mask = padding_input(ids) if padding else tape.empty(ids.shape, FP32)
        types = tape.empty(ids.shape, INT64)
        embedded = self.embeddings(ids, types=types, mask=mask)
        states = self.encoder(embedded, mask)
        return states[-1], None


class DebertaHead(Module):
    """The newer vocabulary head: the embedding's own table as a matrix, and a bias."""

    scope = "head and loss"

    def __init__(self, c: Config, hidden: int, table: Embedding) -> None:
        self.dense = Linear(hidden, hidden, bias=True, group="LM head")
        self.act = activation(c.text("hidden_act"))
        self.LayerNorm = LayerNorm(hidden)
        self.bias = Parameter(table.weight.shape[0], group="LM head")
        self.table = table

    def forward(self, hidden: Tensor) -> Tensor:
        """[b, s, h] to logits [b, s, V]."""
        hidden = self.dense(hidden)
        hidden = self.act(hidden)
        hidden = self.LayerNorm(hidden)
        return ops.add(ops.matmul(hidden, ops.transpose(self.table.weight, 0, 1)), self.bias)


def _first(hidden: Tensor) -> Tensor:
    return ops.select(hidden, 1)


def deberta(c: Config, architecture: str | None) -> Network:
    """DeBERTa v2 and v3. Their published configs name no architecture: it is the bare model then."""
    hidden, dropout = c.integer("hidden_size"), c.probability("hidden_dropout_prob")

    def vocabulary(body: Module) -> Module:
        table: Embedding = vars(body)["embeddings"].word_embeddings
        if not c.flag("legacy", True):
            return DebertaHead(c, hidden, table)
        return VocabularyHead(hidden, c.text("hidden_act"), table, tied=c.flag("tie_word_embeddings"))

    def classifier() -> ClassificationHeadSpec:
        steps = (
            Dropout(c.probability("pooler_dropout")),
            DenseActivation(hidden, hidden, c.text("pooler_hidden_act"), "head"),
            Dropout(c.probability("cls_dropout", dropout)),
        )
        return ClassificationHeadSpec(Linear(hidden, c.num_labels(), bias=True, group="head"), (_first, *steps))

    return encoder(
        c,
        architecture or "DebertaV2Model",
        EncoderRecipe(
            body=lambda _pooler: DebertaModel(c), vocabulary=vocabulary, classifier=classifier, token_dropout=dropout
        ),
    )


FAMILIES = table(
    Family(
        "deberta-v2",
        deberta,
        llama_sizes(
            (128100, 1536, 6144, 24, 24, 0, 512),
            hidden_act="gelu",
            hidden_dropout_prob=0.1,
            attention_probs_dropout_prob=0.1,
            type_vocab_size=0,
            max_relative_positions=-1,
            position_biased_input=True,
            pooler_dropout=0.0,
            pooler_hidden_act="gelu",
            tie_word_embeddings=True,
            legacy=True,
        ),
        blocks="encoder",
        attention="eager",
    )
)
