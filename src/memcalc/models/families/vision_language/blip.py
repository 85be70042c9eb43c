"""BLIP: a vision transformer, and BERT's blocks as a decoder that attends to what it made of the image."""

from __future__ import annotations

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.config.reader import Config
from memcalc.errors import ConfigError
from memcalc.models.common.heads import unknown_head
from memcalc.models.common.image_models import picture
from memcalc.models.common.seq2seq import decoder_cache, decoder_input, encoded
from memcalc.models.family import Family, sizes, table, vit_sizes
from memcalc.nn.kv_cache import Cache
from memcalc.nn.layers.bert import DenseActivation, DenseAddNorm
from memcalc.nn.layers.linear import Embedding, Linear, PositionTable
from memcalc.nn.layers.losses import token_loss
from memcalc.nn.layers.masks import causal_mask
from memcalc.nn.layers.mlp import PlainMLP
from memcalc.nn.layers.norms import LayerNorm
from memcalc.nn.layers.vision_transformer import PatchEmbedding, VisionBlock, VisionTower, grid_of
from memcalc.nn.model import Batch, Network, Outputs
from memcalc.nn.module import Buffer, Module, Parameter
from memcalc.nn.stack import Stack
from memcalc.nn.towers import as_tower
from memcalc.tables.dtypes import INT64


class ImageEmbeddings(Module):
    """Patches after a class token, and a trained position for each."""

    is_input_embedding = True

    def __init__(self, c: Config, hidden: int) -> None:
        height, width = grid_of(c)
        self.class_embedding = Parameter(1, 1, hidden, group="vision")
        self.patch_embedding = PatchEmbedding(c.integer("num_channels"), hidden, c.integer("patch_size"))
        self.patch_embedding.is_input_embedding = False
        self.position_embedding = Parameter(1, height * width + 1, hidden, group="vision")

    def forward(self, pixels: Tensor) -> Tensor:
        """Pixels [b, c, height, width] to [b, n, h]."""
        patches = self.patch_embedding(pixels)
        first = ops.expand(self.class_embedding, pixels.shape[0], 1, -1)
        embeddings = ops.cat([first, patches], 1)
        return ops.add(embeddings, self.position_embedding)


class FusedAttention(Module):
    """Eager attention over one projection to query, key and value."""

    def __init__(self, c: Config, hidden: int) -> None:
        self.heads, self.head_dim = _heads(c, hidden)
        self.qkv = Linear(hidden, 3 * hidden, bias=True, group="vision")
        self.projection = Linear(hidden, hidden, bias=True, group="vision")
        self.dropout = c.probability("attention_dropout")

    def forward(self, hidden: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """[b, n, h] to [b, n, h], and the probabilities."""
        batch, length, width = hidden.shape
        mixed = ops.permute(ops.reshape(self.qkv(hidden), batch, length, 3, self.heads, self.head_dim), 2, 0, 3, 1, 4)
        query, key, value = ops.select(mixed, 0), ops.select(mixed, 0), ops.select(mixed, 0)
        scores = ops.matmul(query, ops.transpose(key, -1, -2))
        scores = ops.mul_scalar(scores)
        probs = ops.softmax(scores)
        probs = ops.dropout(probs, self.dropout)
        context = ops.permute(ops.matmul(probs, value), 0, 2, 1, 3)
        context = ops.reshape(context, batch, length, width)
        return self.projection(context), probs


def _heads(c: Config, hidden: int) -> tuple[int, int]:
    heads = c.integer("num_attention_heads")
    if hidden % heads:
        raise ConfigError(
            f"{c.where}: 'num_attention_heads' {heads} does not divide 'hidden_size' {hidden}; correct one."
        )
    return heads, hidden // heads


class TextAttention(Module):
    """Eager attention with add and LayerNorm after it; keys and values of `states` wide if it looks at an image."""

    scope = "attention"

    def __init__(self, c: Config, states: int | None = None) -> None:
        hidden = c.integer("hidden_size")
        _, self.head_dim = _heads(c, hidden)
        self.query = Linear(hidden, hidden, bias=True, group="attention")
        self.key = Linear(states or hidden, hidden, bias=True, group="attention")
        self.value = Linear(states or hidden, hidden, bias=True, group="attention")
        self.output = DenseAddNorm(hidden, hidden, c.probability("hidden_dropout_prob"), "attention")
        self.dropout = c.probability("attention_probs_dropout_prob")

    def _heads(self, x: Tensor) -> Tensor:
        return ops.transpose(ops.view(x, *x.shape[:-1], -1, self.head_dim), 1, 2)

    def forward(
        self, hidden: Tensor, mask: Tensor | None, states: Tensor | None, cache: Cache | None
    ) -> tuple[Tensor, Tensor]:
        """[b, s, h] to [b, s, h], and the probabilities."""
        context, probs = self._attend(hidden, mask, states, cache)
        return self.output(context, hidden), probs

    def _attend(
        self, hidden: Tensor, mask: Tensor | None, states: Tensor | None, cache: Cache | None
    ) -> tuple[Tensor, Tensor]:
        query = self._heads(self.query(hidden))
        current = hidden if states is None else states
        cached = None if cache is None or states is None else cache.cross_attention_key_values(self)
        if cached is not None:
            key, value = cached
        else:
            key = self._heads(self.key(current))
            value = self._heads(self.value(current))
            if cache is not None:
                key, value = cache.update(self, key, value)
        scores = ops.matmul(query, ops.transpose(key, -1, -2))
        scores = ops.mul_scalar(scores)
        if mask is not None:
            scores = ops.add(scores, mask)
        probs = ops.softmax(scores)
        dropped = ops.dropout(probs, self.dropout)
        context = ops.matmul(dropped, value)
        context = ops.contiguous(ops.permute(context, 0, 2, 1, 3))
        context = ops.view(context, *hidden.shape)
        return context, probs


class TextBlock(Module):
    """Attention to the text, attention to the image, MLP: each with add and LayerNorm after it."""

    scope = "residual stream"

    def __init__(self, c: Config, states: int) -> None:
        hidden, width = c.integer("hidden_size"), c.integer("intermediate_size")
        self.attention = TextAttention(c)
        self.crossattention = TextAttention(c, states)
        self.intermediate = DenseActivation(hidden, width, c.text("hidden_act"), "MLP")
        self.output = DenseAddNorm(width, hidden, c.probability("hidden_dropout_prob"), "MLP")

    def forward(self, hidden: Tensor, states: Tensor, mask: Tensor | None, cache: Cache | None) -> Tensor:
        """[b, s, h] to [b, s, h]."""
        attended, _probs = self.attention(hidden, mask=mask, states=None, cache=cache)
        attended, _probs = self.crossattention(attended, mask=None, states=states, cache=cache)
        return self._feed(attended)

    def _feed(self, attended: Tensor) -> Tensor:
        with attended.tape.scoped("MLP"):
            intermediate = self.intermediate(attended)
            return self.output(intermediate, attended)


class TextDecoder(Module):
    """Embeddings, blocks, and a vocabulary head that shares the table of tokens."""

    def __init__(self, c: Config, states: int, *, tied: bool) -> None:
        hidden, vocab, longest = (c.integer(key) for key in ("hidden_size", "vocab_size", "max_position_embeddings"))
        if c.number("label_smoothing"):
            raise ConfigError(f"{c.where} has 'label_smoothing', which memcalc does not describe; set it to 0.")
        self.word_embeddings = Embedding(vocab, hidden)
        self.position_embeddings = PositionTable(longest, hidden)
        self.LayerNorm = LayerNorm(hidden)
        self.position_ids = Buffer(1, longest, dtype=INT64)
        self.dropout = c.probability("hidden_dropout_prob")
        self.layer = Stack(["block"] * c.integer("num_hidden_layers"), lambda _: TextBlock(c, states))
        self.transform = DenseActivation(hidden, hidden, c.text("hidden_act"), "LM head")
        self.transform_norm = LayerNorm(hidden)
        self.decoder = Linear(hidden, vocab, bias=True, group="LM head")
        if tied:
            self.decoder.weight = self.word_embeddings.weight

    def _embedded(self, ids: Tensor) -> Tensor:
        position_ids = ops.narrow(self.position_ids, 1, ids.shape[1])
        inputs_embeds = self.word_embeddings(ids)
        position_embeddings = self.position_embeddings(position_ids)
        embeddings = ops.add_(inputs_embeds, position_embeddings)
        embeddings = self.LayerNorm(embeddings)
        return ops.dropout(embeddings, self.dropout)

    def _read(self, ids: Tensor, padding: bool, states: Tensor, cache: Cache | None) -> Tensor:
        embedded = self._embedded(ids)
        mask = causal_mask(embedded, padding, past=0 if cache is None else cache.past)
        return self._run(embedded, mask, states, cache)

    def _run(self, hidden: Tensor, mask: Tensor | None, states: Tensor, cache: Cache | None) -> Tensor:
        for layer in self.layer:
            hidden = layer(hidden, states, mask=mask, cache=cache)
        return hidden

    def forward(
        self, ids: Tensor, padding: bool, states: Tensor, cache: Cache | None, labels: Tensor | None
    ) -> tuple[Tensor | None, Tensor]:
        """Ids [b, s] and the image's states [b, n, h] to the loss of the next tokens, and logits [b, s, V]."""
        hidden = self._read(ids, padding, states, cache)
        with ids.tape.scoped("head and loss"):
            logits = self.decoder(self.transform_norm(self.transform(hidden)))
            if labels is None:
                return None, logits
            shifted = ops.contiguous(ops.narrow(logits, 1, logits.shape[1] - 1))
            shifted_labels = ops.contiguous(ops.narrow(labels, 1, labels.shape[1] - 1))
            return token_loss(shifted, shifted_labels), logits


class BlipForConditionalGeneration(Network):
    """An image and what is written about it. Generation begins with a start token."""

    main_input = "pixel_values"
    source_is_text = False

    def __init__(self, c: Config) -> None:
        vision, text = c.nested("vision_config", _VISION), c.nested("text_config", _TEXT)
        hidden = vision.integer("hidden_size")

        def block(_: int) -> Module:
            act = vision.text("hidden_act")
            parts = {
                "self_attn": FusedAttention(vision, hidden),
                "layer_norm1": LayerNorm(hidden),
                "mlp": PlainMLP(hidden, vision.integer("intermediate_size"), act, names=("fc1", "fc2"), bias=True),
                "layer_norm2": LayerNorm(hidden),
            }
            return VisionBlock(parts, ("layer_norm1", "self_attn", "layer_norm2", "mlp"))

        blocks = Stack(["layer"] * vision.integer("num_hidden_layers"), block, name="vision block")
        self.vision_model = as_tower(VisionTower(ImageEmbeddings(vision, hidden), blocks, after=LayerNorm(hidden)))
        self.text_decoder = TextDecoder(text, hidden, tied=c.flag("tie_word_embeddings"))
        self.config = vision

    def forward(self, batch: Batch) -> Outputs:
        """Loss and logits."""
        cache = decoder_cache(batch.ids.tape, in_training=False)
        pooled: list[Tensor] = []  # unused, but there to the end
        states = encoded(batch, cache, lambda _ids, _padding: self._encode_images(batch, pooled))
        ids = batch.ids if batch.labels is not None else decoder_input(batch, None, cache)
        labels = None if batch.labels is None else batch.token_labels()
        loss, logits = self.text_decoder(ids, batch.padding, states, cache, labels)
        if cache is not None:
            cache.past += ids.shape[1]
        return Outputs(loss, (logits, states))

    def _encode_images(self, batch: Batch, pooled: list[Tensor]) -> Tensor:
        states, _, _ = self.vision_model(picture(batch, self.config))
        assert self.vision_model.post_layernorm is not None
        pooled.append(self.vision_model.post_layernorm(ops.select(states, 1)))
        return states


def blip(c: Config, architecture: str | None) -> Network:
    """BLIP that captions images."""
    name = architecture or ""
    if name and not name.endswith("ForConditionalGeneration"):
        raise unknown_head(c, name, ("ForConditionalGeneration",))
    return BlipForConditionalGeneration(c)


_TEXT = sizes(
    (30524, 768, 3072, 12, 8, 0, 512),
    hidden_act="gelu",
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
    label_smoothing=0.0,
)
_VISION = vit_sizes((768, 3072, 12, 12, 384, 16, 3), hidden_act="gelu", attention_dropout=0.0)
FAMILIES = table(
    Family("blip", blip, {"tie_word_embeddings": True}, {}, "encoder-decoder", "eager", "measured rows, exact counts")
)
