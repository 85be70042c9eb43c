"""LayoutLMv3: words with their boxes and the patches of the page in one sequence, and biases by distance on the page.

Source: transformers/models/layoutlmv3 5.24. The biases are looked up outside the graph: their weights are not trained.
"""

from __future__ import annotations

from memcalc import ops
from memcalc.autograd.tape import OVERHEAD
from memcalc.autograd.tensor import Tensor
from memcalc.config.reader import Config
from memcalc.models.common.encoder import ClassificationHeadSpec, EncoderClassifier
from memcalc.models.common.heads import TokenClassifier, unknown_head
from memcalc.models.family import Family, sizes, table
from memcalc.nn.layers.attention_backends import split_heads
from memcalc.nn.layers.bert import DenseActivation, DenseAddNorm, count_tokens
from memcalc.nn.layers.encoder_heads import ClsTokenHead
from memcalc.nn.layers.linear import Embedding, Linear, PositionTable
from memcalc.nn.layers.masks import OWN_ONES_NOTE, bidirectional_mask
from memcalc.nn.layers.norms import LayerNorm
from memcalc.nn.layers.relative_attention import attend_with_bias
from memcalc.nn.layers.vision_transformer import PatchEmbedding, grid_of
from memcalc.nn.model import IMAGES, Network
from memcalc.nn.module import Buffer, Module, Parameter
from memcalc.nn.run_context import run_context
from memcalc.nn.stack import Stack
from memcalc.tables.dtypes import FP32, INT32, INT64


class BoxEmbeddings(Module):
    """Word, type, position and box embeddings, summed, normalised, dropped out."""

    scope = "embedding"

    def __init__(self, c: Config, hidden: int) -> None:
        longest, coordinate, shape = (
            c.integer(key) for key in ("max_position_embeddings", "coordinate_size", "shape_size")
        )
        places = c.integer("max_2d_position_embeddings")
        self.word_embeddings = Embedding(c.integer("vocab_size"), hidden)
        self.token_type_embeddings = Embedding(c.integer("type_vocab_size"), hidden)
        self.LayerNorm = LayerNorm(hidden)
        self.position_ids = Buffer(1, longest, dtype=INT64)
        self.position_embeddings = PositionTable(longest, hidden, offset=c.integer("pad_token_id", 1, minimum=0) + 1)
        self.x_position_embeddings = Embedding(places, coordinate)
        self.y_position_embeddings = Embedding(places, coordinate)
        self.h_position_embeddings = Embedding(places, shape)
        self.w_position_embeddings = Embedding(places, shape)
        self.dropout = c.probability("hidden_dropout_prob")

    def _spatial(self, box: Tensor) -> Tensor:
        left = self.x_position_embeddings(ops.select(box, 2))
        upper = self.y_position_embeddings(ops.select(box, 2))
        right = self.x_position_embeddings(ops.select(box, 2))
        lower = self.y_position_embeddings(ops.select(box, 2))
        height = self.h_position_embeddings(ops.empty_like(ops.sub(ops.select(box, 2), ops.select(box, 2))))
        width = self.w_position_embeddings(ops.empty_like(ops.sub(ops.select(box, 2), ops.select(box, 2))))
        return ops.cat([left, upper, right, lower, height, width], -1)

    def forward(self, ids: Tensor, box: Tensor, types: Tensor) -> Tensor:
        """Ids and types [b, s] and boxes [b, s, 4] to [b, s, h]."""
        position_ids = count_tokens(ids)
        inputs_embeds = self.word_embeddings(ids)
        of_type = self.token_type_embeddings(types)
        embeddings = ops.add(inputs_embeds, of_type)
        of_position = self.position_embeddings(position_ids)
        embeddings = ops.add_(embeddings, of_position)
        spatial = self._spatial(box)
        embeddings = ops.add(embeddings, spatial)
        embeddings = self.LayerNorm(embeddings)
        return ops.dropout(embeddings, self.dropout)


class LayoutSelfAttention(Module):
    """BERT's attention, with a bias on the scores."""

    scope = "attention"

    def __init__(self, c: Config, hidden: int) -> None:
        self.head_dim = hidden // c.divides("num_attention_heads", "hidden_size")
        self.query = Linear(hidden, hidden, bias=True, group="attention")
        self.key = Linear(hidden, hidden, bias=True, group="attention")
        self.value = Linear(hidden, hidden, bias=True, group="attention")
        self.dropout = c.probability("attention_probs_dropout_prob")

    def forward(self, hidden: Tensor, mask: Tensor | None, bias: Tensor) -> tuple[Tensor, Tensor | None]:
        """[b, s, h] to [b, s, h], and the probabilities where they exist."""
        query = split_heads(self.query(hidden), self.head_dim)
        key = split_heads(self.key(hidden), self.head_dim)
        value = split_heads(self.value(hidden), self.head_dim)
        out, weights = attend_with_bias(query, key, value, mask, bias, self.dropout, causal=False)
        return ops.contiguous(ops.reshape(out, *hidden.shape[:-1], -1)), weights


class LayoutLayer(Module):
    """Attention, then MLP, each followed by add and LayerNorm. Transformers does not let it be checkpointed."""

    scope = "MLP"
    supports_checkpointing = False

    def __init__(self, c: Config, hidden: int) -> None:
        width, rate = c.integer("intermediate_size"), c.probability("hidden_dropout_prob")
        self.self = LayoutSelfAttention(c, hidden)
        self.attention_output = DenseAddNorm(hidden, hidden, rate, "attention")
        self.intermediate = DenseActivation(hidden, width, c.text("hidden_act"), "MLP")
        self.output = DenseAddNorm(width, hidden, rate, "MLP")

    def forward(self, hidden: Tensor, mask: Tensor | None, bias: Tensor) -> Tensor:
        """[b, s, h] to [b, s, h]."""
        attended = self._attended(hidden, mask, bias)
        intermediate = self.intermediate(attended)
        return self.output(intermediate, attended)

    def _attended(self, hidden: Tensor, mask: Tensor | None, bias: Tensor) -> Tensor:
        out, _weights = self.self(hidden, mask, bias)
        return self.attention_output(out, hidden)


class LayoutModel(Module):
    """Words and patches, and blocks over both. `of_text`: only the states of the words are given."""

    assumption = OWN_ONES_NOTE

    def __init__(self, c: Config, *, of_text: bool) -> None:
        hidden, self.heads = c.integer("hidden_size"), c.integer("num_attention_heads")
        rows, columns = grid_of(c)
        self.sides, self.channels, self.of_text = c.sides("image_size"), c.integer("num_channels"), of_text
        self.cls_token = Parameter(1, 1, hidden, group="embedding")
        self.pos_embed = Parameter(1, rows * columns + 1, hidden, group="embedding")
        self.embeddings = BoxEmbeddings(c, hidden)
        self.patch_embed = PatchEmbedding(self.channels, hidden, c.integer("patch_size"))
        self.LayerNorm = LayerNorm(hidden)
        self.visual_bbox = Buffer(rows * columns + 1, 4, dtype=INT64)
        self.norm = LayerNorm(hidden)
        self.dropout = c.probability("hidden_dropout_prob")
        self.layer = Stack(["layer"] * c.integer("num_hidden_layers"), lambda _: LayoutLayer(c, hidden))
        self.by_order = c.flag("has_relative_attention_bias", True)
        self.by_place = c.flag("has_spatial_attention_bias", True)
        self.spans = 2 * c.integer("max_rel_pos", 128) + 1, 2 * c.integer("max_rel_2d_pos", 256) + 1
        if self.by_order:
            self.rel_pos_bias = Linear(c.integer("rel_pos_bins", 32), self.heads, group="attention")
        if self.by_place:
            bins = c.integer("rel_2d_pos_bins", 64)
            self.rel_pos_x_bias = Linear(bins, self.heads, group="attention")
            self.rel_pos_y_bias = Linear(bins, self.heads, group="attention")

    def _image(self, ids: Tensor) -> Tensor:
        tape, batch = ids.tape, ids.shape[0]
        dtype = run_context(tape).weights_dtype
        pixels = tape.external_tensor((batch, self.channels, *self.sides), dtype, OVERHEAD, IMAGES)
        embeddings = self.patch_embed(pixels)
        embeddings = ops.cat([ops.expand(self.cls_token, batch, -1, -1), embeddings], 1)
        embeddings = ops.add(embeddings, self.pos_embed)
        return self.norm(embeddings)

    def _looked_up(self, places: Tensor, weight: Tensor, span: int) -> Tensor:
        """The bias [b, heads, s, s] of places [b, s], outside the graph."""
        tape, (batch, length) = places.tape, places.shape
        narrow = tape.empty(places.shape, INT32)
        indices = tape.empty((batch, length, length), INT32)
        with tape.no_grad():
            rows = tape.empty((self.heads, span), weight.dtype)
            values = tape.empty((self.heads, batch, length, length), weight.dtype)
        del narrow, indices, rows
        return ops.transpose(values, 0, 1)

    def _bias(self, places: Tensor, box: Tensor, like: Tensor) -> Tensor:
        first = second = None
        if self.by_place:
            first = self._looked_up(ops.select(box, 2), self.rel_pos_x_bias.weight, self.spans[1])
            second = self._looked_up(ops.select(box, 2), self.rel_pos_y_bias.weight, self.spans[1])
            del second
        third = self._looked_up(places, self.rel_pos_bias.weight, self.spans[0])
        return third if first is None else first

    def forward(self, ids: Tensor, padding: bool) -> tuple[Tensor, Tensor | None]:
        """Ids [b, s] to hidden states."""
        tape, (batch, length) = ids.tape, ids.shape
        box = tape.external_tensor((batch, length, 4), INT64, OVERHEAD, "boxes")
        ones = tape.empty((batch, length), FP32)
        types = tape.empty((batch, length), INT64)
        embedded = self.embeddings(ids, box, types)
        visual = self._image(ids)
        patches = visual.shape[1]
        of_patches = tape.empty((batch, patches), INT64)
        ones = tape.empty((batch, length + patches), FP32)
        visual_box = tape.empty((batch, patches, 4), INT64)
        box = tape.empty((batch, length + patches, 4), INT64)
        visual_places = tape.empty((batch, patches), INT64)
        range_ = tape.empty((length,), INT64)
        places = tape.empty((batch, length + patches), INT64)
        embedded = ops.cat([embedded, visual], 1)
        embedded = self.LayerNorm(embedded)
        embedded = ops.dropout(embedded, self.dropout)
        mask = bidirectional_mask(embedded, True)
        del ones
        bias = self._bias(places, box, embedded)
        hidden = embedded
        for layer in self.layer:
            hidden = layer(hidden, mask, bias=bias)
        del of_patches, visual_box, visual_places, range_, visual, types
        return (ops.narrow(hidden, 1, length) if self.of_text else hidden), None


class TokenFront(Module):
    """Dropout, and a dense layer with tanh: before the scores of ten classes or more."""

    def __init__(self, hidden: int, first: float, second: float) -> None:
        self.dense = Linear(hidden, hidden, bias=True, group="head")
        self.rates = first, second

    def forward(self, hidden: Tensor) -> Tensor:
        """[b, s, h] to [b, s, h]."""
        hidden = ops.dropout(ops.dropout(hidden, self.rates[0]), self.rates[1])
        return ops.tanh(self.dense(hidden))


def layoutlmv3(c: Config, architecture: str | None) -> Network:
    """LayoutLMv3 that classifies words or pages."""
    hidden, rate = c.integer("hidden_size"), c.probability("hidden_dropout_prob")
    own = c.probability("classifier_dropout", rate)
    name = architecture or "LayoutLMv3ForTokenClassification"
    network: Network
    if name.endswith("ForTokenClassification"):
        many = c.num_labels() >= 10
        front = TokenFront(hidden, rate, own) if many else None
        body = LayoutModel(c, of_text=True)
        network = TokenClassifier(c, body, hidden, own_loss=True, front=front, dropout=own if many else rate)
        network.image_of_config = True
        return network
    if name.endswith("ForSequenceClassification"):
        how = ClassificationHeadSpec(ClsTokenHead(hidden, c.num_labels(), "tanh", own))
        network = EncoderClassifier(LayoutModel(c, of_text=False), how, c.problem_type())
        network.image_of_config = True
        return network
    raise unknown_head(c, name, ("ForTokenClassification", "ForSequenceClassification"))


FAMILIES = table(
    Family(
        "layoutlmv3",
        layoutlmv3,
        sizes(
            (50265, 768, 3072, 12, 12, 0, 512),
            hidden_act="gelu",
            hidden_dropout_prob=0.1,
            attention_probs_dropout_prob=0.1,
            type_vocab_size=2,
            max_2d_position_embeddings=1024,
            coordinate_size=128,
            shape_size=128,
            image_size=224,
            patch_size=16,
            num_channels=3,
        ),
        {"input_size": "image_size"},
        blocks="encoder",
        attention="eager, sdpa",
    )
)
