"""The towers of CLIP and SigLIP, which many models that see images begin with, and the defaults of their configs."""

from __future__ import annotations

from collections.abc import Sequence

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.config.reader import Config
from memcalc.models.family import sizes
from memcalc.nn.layers.attention_pooling import AttentionPooling
from memcalc.nn.layers.linear import Embedding, Linear, check_length
from memcalc.nn.layers.masks import bidirectional_mask, causal_mask
from memcalc.nn.layers.mlp import PlainMLP
from memcalc.nn.layers.norms import LayerNorm
from memcalc.nn.layers.vision_transformer import (
    PatchEmbedding,
    VisionAttention,
    VisionBlock,
    VisionTower,
    grid_of,
    kinds_of,
)
from memcalc.nn.module import Buffer, Module, Parameter
from memcalc.nn.stack import Stack
from memcalc.tables.dtypes import INT32, INT64

_SHARED = {
    "num_hidden_layers": 12,
    "attention_dropout": 0.0,
    "num_channels": 3,
    "image_size": 224,
    "vision_use_head": True,
}
CLIP_TEXT = _SHARED | sizes((49408, 512, 2048, 0, 8, 0, 77), projection_dim=512, hidden_act="quick_gelu")
CLIP_VISION = _SHARED | {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "projection_dim": 512,
    "num_attention_heads": 12,
    "patch_size": 32,
    "hidden_act": "quick_gelu",
}
SIGLIP_TEXT = _SHARED | sizes((32000, 768, 3072, 0, 12, 0, 64), hidden_act="gelu_pytorch_tanh")
SIGLIP_VISION = _SHARED | {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_attention_heads": 12,
    "patch_size": 16,
    "hidden_act": "gelu_pytorch_tanh",
}


class GridEmbeddings(Module):
    """Patches, after a class token where there is one (CLIP), and a table of positions."""

    scope = "embedding"

    def __init__(self, c: Config, *, classed: bool, bias: bool) -> None:
        hidden = c.integer("hidden_size")
        height, width = grid_of(c)
        self.class_embedding = Parameter(hidden, group="embedding") if classed else None
        self.patch_embedding = PatchEmbedding(
            c.integer("num_channels"), hidden, c.integer("patch_size"), bias=bias, bare=True
        )
        self.position_embedding = Embedding(height * width + classed, hidden)
        self.position_ids = Buffer(1, height * width + classed, dtype=INT64)

    def forward(self, pixels: Tensor) -> Tensor:
        """Pixels [b, c, height, width] to [b, n, h]."""
        embeddings = self.patch_embedding(pixels)
        if self.class_embedding is not None:
            first = ops.expand(self.class_embedding, pixels.shape[0], 1, -1)
            embeddings = ops.cat([first, embeddings], 1)
        return ops.add(embeddings, self.position_embedding(self.position_ids))


class TextEmbeddings(Module):
    """Token and position embeddings."""

    scope = "embedding"

    def __init__(self, c: Config) -> None:
        hidden, self.longest = c.integer("hidden_size"), c.integer("max_position_embeddings")
        self.token_embedding = Embedding(c.integer("vocab_size"), hidden)
        self.position_embedding = Embedding(self.longest, hidden)
        self.position_ids = Buffer(1, self.longest, dtype=INT64)

    def forward(self, ids: Tensor) -> Tensor:
        """Ids [b, s] to [b, s, h]."""
        check_length(ids, self.longest)
        position_ids = ops.narrow(self.position_ids, 1, ids.shape[1])
        inputs_embeds = self.token_embedding(ids)
        position_embeddings = self.position_embedding(position_ids)
        return ops.add(inputs_embeds, position_embeddings)


def tower_blocks(c: Config, name: str, *, together: bool, keep: Sequence[int] = ()) -> Stack:
    """Blocks of either tower; CLIP projects query, key and value `together`, and registers attention first."""
    hidden, heads, act = c.integer("hidden_size"), c.integer("num_attention_heads"), c.text("hidden_act")

    def block(_: int) -> Module:
        attention = VisionAttention(
            hidden,
            heads,
            names=("q_proj", "k_proj", "v_proj", "out_proj"),
            together=together,
            dropout=c.probability("attention_dropout"),
        )
        mlp = PlainMLP(hidden, c.integer("intermediate_size"), act, names=("fc1", "fc2"), bias=True)
        norms = LayerNorm(hidden), LayerNorm(hidden)
        parts: dict[str, Module] = {
            "layer_norm1": norms[0],
            "self_attn": attention,
            "layer_norm2": norms[1],
            "mlp": mlp,
        }
        if together:
            parts = {part: parts[part] for part in ("self_attn", "layer_norm1", "mlp", "layer_norm2")}
        return VisionBlock(parts, ("layer_norm1", "self_attn", "layer_norm2", "mlp"), residual_first=True)

    return Stack(kinds_of(c.integer("num_hidden_layers"), keep), block, name=name)


def clip_vision(c: Config, keep: Sequence[int] = ()) -> VisionTower:
    """CLIP's vision tower: a class token, a norm before the blocks, and one on the pooled class token."""
    hidden = c.integer("hidden_size")
    return VisionTower(
        GridEmbeddings(c, classed=True, bias=False),
        tower_blocks(c, "vision block", together=True, keep=keep),
        keep=keep,
        before=LayerNorm(hidden),
        after=LayerNorm(hidden),
        norm_pooled=True,
    )


def siglip_vision(c: Config, keep: Sequence[int] = ()) -> VisionTower:
    """SigLIP's vision tower: no class token; attention pools the patches, where the config has that head."""
    hidden, heads = c.integer("hidden_size"), c.integer("num_attention_heads")
    head = AttentionPooling(hidden, heads, c.integer("intermediate_size"), c.text("hidden_act"))
    return VisionTower(
        GridEmbeddings(c, classed=False, bias=True),
        tower_blocks(c, "vision block", together=False, keep=keep),
        keep=keep,
        after=LayerNorm(hidden),
        pool=head if c.flag("vision_use_head") else None,
    )


class TextTower(Module):
    """Embeddings, blocks, final norm, and the token that stands for the text: its end (CLIP), or the last (SigLIP)."""

    def __init__(self, c: Config, *, causal: bool) -> None:
        hidden = c.integer("hidden_size")
        self.embeddings = TextEmbeddings(c)
        self.layers = tower_blocks(c, "text block", together=causal)
        self.final_layer_norm = LayerNorm(hidden)
        self.head = None if causal else Linear(hidden, c.integer("projection_size", hidden), bias=True, group="head")
        self.causal = causal

    def forward(self, ids: Tensor, padding: bool) -> tuple[Tensor, Tensor]:
        """Ids [b, s] to hidden states [b, s, h] and the text's vector [b, h]."""
        tape = ids.tape
        ids = ops.view(ids, -1, ids.shape[-1])
        embedded = self.embeddings(ids)
        mask = causal_mask(embedded, padding) if self.causal else bidirectional_mask(embedded, padding)
        hidden = embedded
        for layer in self.layers:
            hidden = layer(hidden, mask)
        last = self.final_layer_norm(hidden)
        if self.head is not None:
            return last, self.head(ops.select(last, 1))
        narrow = ops.to(ids, INT32)
        where = tape.empty(ids.shape[:1], INT64)
        del narrow
        return last, ops.index(last, tape.empty(ids.shape[:1], INT64), where)
