"""BLIP-2: a vision transformer, queries that look at what it made of the image (Q-Former), and a decoder."""

from __future__ import annotations

from typing import Any

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.config.reader import Config
from memcalc.errors import ConfigError
from memcalc.models.common.heads import unknown_head
from memcalc.models.common.vision_encoder import ImageFeatures, VisionEncoder
from memcalc.models.common.vision_language import VisionLanguage, image_token_mask, language_model
from memcalc.models.families.vision_language.blip import ImageEmbeddings
from memcalc.models.family import Family, sizes, table, vit_sizes
from memcalc.nn.kv_cache import Cache
from memcalc.nn.layers.attention_backends import attend_same_dtype, split_heads
from memcalc.nn.layers.bert import DenseActivation, DenseAddNorm
from memcalc.nn.layers.linear import Linear
from memcalc.nn.layers.losses import causal_lm_loss
from memcalc.nn.layers.masks import OWN_ONES_NOTE, bidirectional_mask
from memcalc.nn.layers.mlp import PlainMLP
from memcalc.nn.layers.norms import LayerNorm
from memcalc.nn.layers.vision_transformer import VisionBlock, VisionTower, grid_of
from memcalc.nn.model import Batch, Network, Outputs
from memcalc.nn.module import Module, Parameter
from memcalc.nn.run_context import run_context
from memcalc.nn.stack import Stack
from memcalc.nn.towers import as_tower
from memcalc.tables.dtypes import INT64


class Blip2Attention(Module):
    """Attention of the tower: one projection to query, key and value."""

    def __init__(self, v: Config) -> None:
        hidden, heads = v.integer("hidden_size"), v.integer("num_attention_heads")
        if hidden % heads:
            raise ConfigError(f"{v.where}: 'num_attention_heads' {heads} does not divide {hidden}; correct one.")
        self.heads = heads
        self.qkv = Linear(hidden, 3 * hidden, bias=v.flag("qkv_bias"))
        self.projection = Linear(hidden, hidden, bias=True)
        self.dropout = v.probability("attention_dropout")

    def forward(self, hidden: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """[b, n, h] to [b, n, h], and the probabilities where they exist."""
        mixed = self.qkv(hidden)
        mixed = ops.permute(ops.reshape(mixed, *hidden.shape[:2], 3, self.heads, -1), 2, 0, 3, 1, 4)
        query, key, value = ops.select(mixed, 0), ops.select(mixed, 0), ops.select(mixed, 0)
        out, weights = attend_same_dtype(query, key, value, None, self.dropout, cast_back=False)
        out = ops.contiguous(ops.reshape(ops.contiguous(out), *hidden.shape))
        out = self.projection(out)
        return out, weights


class QFormerAttention(Module):
    """Attention to the queries, or to an image's states of width `states`, with add and LayerNorm after it."""

    def __init__(self, q: Config, states: int | None = None) -> None:
        hidden, heads = q.integer("hidden_size"), q.integer("num_attention_heads")
        if hidden % heads:
            raise ConfigError(f"{q.where}: 'num_attention_heads' {heads} does not divide {hidden}; correct one.")
        self.head_dim = hidden // heads
        self.query = Linear(hidden, hidden, bias=True)
        self.key = Linear(states or hidden, hidden, bias=True)
        self.value = Linear(states or hidden, hidden, bias=True)
        self.output = DenseAddNorm(hidden, hidden, q.probability("hidden_dropout_prob"), "attention")
        self.dropout = q.probability("attention_probs_dropout_prob")

    def forward(self, hidden: Tensor, mask: Tensor | None, states: Tensor | None = None) -> Tensor:
        """[b, q, h] to [b, q, h]."""
        return self.output(self._attend(hidden, mask, states), hidden)

    def _attend(self, hidden: Tensor, mask: Tensor | None, states: Tensor | None) -> Tensor:
        current = hidden if states is None else states
        query = split_heads(self.query(hidden), self.head_dim)
        key = split_heads(self.key(current), self.head_dim)
        value = split_heads(self.value(current), self.head_dim)
        out, _weights = attend_same_dtype(query, key, value, mask, self.dropout, cast_back=False)
        return ops.contiguous(ops.reshape(ops.contiguous(out), *hidden.shape))


class QFormerBlock(Module):
    """Attention to the queries, in some blocks attention to the image, and an MLP."""

    def __init__(self, q: Config, states: int | None) -> None:
        hidden, width = q.integer("hidden_size"), q.integer("intermediate_size")
        self.attention = QFormerAttention(q)
        self.crossattention = None if states is None else QFormerAttention(q, states)
        self.intermediate_query = DenseActivation(hidden, width, q.text("hidden_act"), "MLP")
        self.output_query = DenseAddNorm(width, hidden, q.probability("hidden_dropout_prob"), "MLP")

    def forward(self, hidden: Tensor, states: Tensor, mask: Tensor | None) -> Tensor:
        """[b, q, h] to [b, q, h]."""
        attended = self.attention(hidden, None)
        looked = attended if self.crossattention is None else self.crossattention(attended, mask, states)
        return self.output_query(self.intermediate_query(looked), looked)


class QFormer(Module):
    """LayerNorm and dropout over the queries, and blocks."""

    def __init__(self, q: Config, states: int) -> None:
        if q.flag("use_qformer_text_input"):
            raise ConfigError(f"{q.where} has 'use_qformer_text_input', which this head does not use; set it to false.")
        every = q.integer("cross_attention_frequency")
        self.layernorm = LayerNorm(q.integer("hidden_size"))
        self.dropout = q.probability("hidden_dropout_prob")
        self.encoder = Stack(
            [position % every == 0 for position in range(q.integer("num_hidden_layers"))],
            lambda position: QFormerBlock(q, states if position % every == 0 else None),
            name="query block",
        )

    def forward(self, queries: Tensor, states: Tensor) -> Tensor:
        """Queries [b, q, h] and the image's states [b, n, width] to [b, q, h]."""
        embedded = self.layernorm(queries)
        embedded = ops.dropout(embedded, self.dropout)
        mask = bidirectional_mask(embedded, True, states.shape[1])
        hidden = embedded
        for block in self.encoder:
            hidden = block(hidden, states, mask=mask)
        return hidden


class Blip2VisionEncoder(VisionEncoder):
    """The tower, the Q-Former and a projection to the decoder's width."""

    def __init__(self, c: Config, v: Config, q: Config, width: int) -> None:
        hidden, queries = v.integer("hidden_size"), q.integer("hidden_size")
        self.config, self.count = v, c.integer("num_query_tokens")

        def block(_: int) -> Module:
            act = v.text("hidden_act")
            parts = {
                "self_attn": Blip2Attention(v),
                "layer_norm1": LayerNorm(hidden),
                "mlp": PlainMLP(hidden, v.integer("intermediate_size"), act, names=("fc1", "fc2"), bias=True),
                "layer_norm2": LayerNorm(hidden),
            }
            return VisionBlock(parts, ("layer_norm1", "self_attn", "layer_norm2", "mlp"))

        blocks = Stack(["layer"] * v.integer("num_hidden_layers"), block, name="vision block")
        grid_of(v)
        self.vision_model = VisionTower(ImageEmbeddings(v, hidden), blocks, after=LayerNorm(hidden))
        self.query_tokens = Parameter(1, self.count, queries)
        self.qformer = QFormer(q, hidden)
        self.language_projection = Linear(queries, width, bias=True)

    def forward(self, pixels: Tensor) -> ImageFeatures:
        """Pixels [b, c, height, width] to features [b, queries, width]."""
        states, _, _ = self.vision_model(pixels)
        assert self.vision_model.post_layernorm is not None
        pooled = self.vision_model.post_layernorm(ops.select(states, 1))  # unused, but in the output
        ones = pixels.tape.empty(states.shape[:2], INT64)
        queries = ops.expand(self.query_tokens, states.shape[0], -1, -1)
        found = self.qformer(queries, states)
        features = self.language_projection(ops.to(found, states.dtype))
        del ones
        return ImageFeatures(features, (states, pooled, found, features))


class Blip2(VisionLanguage):
    """A decoder that gets a mask of ones from the model around it where it gets no other."""

    assumption = OWN_ONES_NOTE

    def forward(self, batch: Batch) -> Outputs:
        """Loss and logits. The decoder computes no loss, so its hidden states go before there is one."""
        text, run = self.text, run_context(batch.ids)
        if batch.labels is None or batch.scored_tokens is not None or text.loss is not None or run.hidden_states:
            return super().forward(batch)
        hidden, kept, _held = self._read(batch)
        with batch.ids.tape.scoped("head and loss"):
            logits = text.logits(hidden)
            del hidden
            loss = causal_lm_loss(logits, batch.labels, counts_items=batch.counts_items)
        return Outputs(loss, (logits, *kept))

    def _read(self, batch: Batch) -> tuple[Tensor, tuple[Any, ...], tuple[Any, ...]]:
        ids, run = batch.ids, run_context(batch.ids)
        if not batch.images or run.past_length:
            return super()._read(batch)
        images = self._encode_images(batch)
        embeds = vars(self.text.model)["embed_tokens"](ids)
        given = run.padding
        if not batch.padding:
            run.padding = ids.tape.empty(ids.shape, INT64)
        features = images.features
        assert isinstance(features, Tensor)
        features = ops.to(features, embeds.dtype)
        mask, *_ = image_token_mask(ids, 1)
        embeds = ops.masked_scatter(embeds, mask, features)
        outer = run.cache
        made = Cache() if outer is None and self.caches and not run.checkpointing else None
        run.cache = outer or made
        with run.attention_backend(self.attention_of(run.attention)):
            hidden = self.text.model(ids, True, embeds=embeds)
        held = (embeds, features, mask, run.padding)
        run.cache, run.padding = outer, given
        return hidden, (images.returned, made), held


def blip2(c: Config, architecture: str | None) -> Network:
    """BLIP-2 that writes about images."""
    if architecture and not architecture.endswith("ForConditionalGeneration"):
        raise unknown_head(c, architecture, ("ForConditionalGeneration",))
    v, q = c.nested("vision_config", _VISION), c.nested("qformer_config", _QFORMER)
    text = language_model(c, "opt", tied=c.section("text_config").get("tie_word_embeddings") is not False)
    encoder = Blip2VisionEncoder(c, v, q, text.model.lm_head.weight.shape[1])
    return Blip2(as_tower(encoder), text, own_cache=True)


_VISION = vit_sizes((1408, 6144, 39, 16, 224, 14, 3), hidden_act="gelu", attention_dropout=0.0, qkv_bias=True)
_QFORMER = sizes(
    (30522, 768, 3072, 12, 12, 0, 512),
    hidden_act="gelu",
    hidden_dropout_prob=0.1,
    attention_probs_dropout_prob=0.1,
    cross_attention_frequency=2,
)
FAMILIES = table(Family("blip-2", blip2, {"num_query_tokens": 32}, kinds="vision tower, query transformer, decoder"))
