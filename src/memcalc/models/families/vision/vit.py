"""Vision transformers: ViT, DeiT, DINOv2. One image per sequence of the batch; the config decides its size."""

from __future__ import annotations

from functools import partial

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.config.reader import Config
from memcalc.models.common.image_models import class_scores, image_network
from memcalc.models.family import Family, table, vit_sizes
from memcalc.nn.layers.bert import Pooler
from memcalc.nn.layers.mlp import GatedMLP, PlainMLP
from memcalc.nn.layers.norms import LayerNorm
from memcalc.nn.layers.vision_transformer import (
    LayerScale,
    PatchEmbedding,
    VisionAttention,
    VisionBlock,
    VisionTower,
    grid_of,
)
from memcalc.nn.model import Batch, Network, Outputs
from memcalc.nn.module import Module, Parameter
from memcalc.nn.stack import Stack


class TokenEmbeddings(Module):
    """Patches after a class token (and DeiT's distillation token), and a trained position for each.

    Register tokens have no position: they come between the class token and the patches when the others have theirs.
    """

    scope = "embedding"

    def __init__(
        self, c: Config, hidden: int, *, distilled: bool = False, masked: bool = False, registers: int = 0
    ) -> None:
        height, width = grid_of(c)
        self.cls_token = Parameter(1, 1, hidden, group="embedding")
        self.mask_token = Parameter(1, hidden, group="embedding") if masked else None
        self.register_tokens = Parameter(1, registers, hidden, group="embedding") if registers else None
        self.patch_embeddings = PatchEmbedding(c.integer("num_channels"), hidden, c.integer("patch_size"))
        self.position_embeddings = Parameter(1, height * width + 1 + distilled, hidden, group="embedding")
        self.distillation_token = Parameter(1, 1, hidden, group="embedding") if distilled else None
        self.dropout = c.probability("hidden_dropout_prob")

    def forward(self, pixels: Tensor) -> Tensor:
        """Pixels [b, c, height, width] to [b, n, h]."""
        batch = pixels.shape[0]
        embeddings = self.patch_embeddings(pixels)
        tokens = [token for token in (self.cls_token, self.distillation_token) if token is not None]
        embeddings = ops.cat([*(ops.expand(token, batch, -1, -1) for token in tokens), embeddings], 1)
        embeddings = ops.add(embeddings, self.position_embeddings)
        if self.register_tokens is not None:
            first = ops.narrow(embeddings, 1, 1)
            registers = ops.expand(self.register_tokens, batch, -1, -1)
            embeddings = ops.cat([first, registers, ops.narrow(embeddings, 1, embeddings.shape[1] - 1)], 1)
            del first, registers
        return ops.dropout(embeddings, self.dropout)


def _attention(c: Config, hidden: int, *, own_dtype: bool = False) -> Module:
    return VisionAttention(
        hidden,
        c.integer("num_attention_heads"),
        bias=c.flag("qkv_bias"),
        own_dtype=own_dtype,
        dropout=c.probability("attention_probs_dropout_prob"),
    )


def vit_blocks(c: Config, name: str = "block") -> Stack:
    """ViT's blocks: norm, attention, add; norm, MLP, add."""
    hidden, act = c.integer("hidden_size"), c.text("hidden_act")

    def block(_: int) -> Module:
        mlp = PlainMLP(hidden, c.integer("intermediate_size"), act, names=("fc1", "fc2"), bias=True)
        parts = {
            "attention": _attention(c, hidden),
            "layernorm_before": LayerNorm(hidden),
            "layernorm_after": LayerNorm(hidden),
            "mlp": mlp,
        }
        roles = ("layernorm_before", "attention", "layernorm_after", "mlp")
        return VisionBlock(parts, roles, dropout=c.probability("hidden_dropout_prob"))

    return Stack(["layer"] * c.integer("num_hidden_layers"), block, name=name)


def _vit_tower(c: Config, *, distilled: bool = False, pooler: bool = False) -> VisionTower:
    hidden = c.integer("hidden_size")
    width = c.integer("pooler_output_size", hidden)
    return VisionTower(
        TokenEmbeddings(c, hidden, distilled=distilled),
        vit_blocks(c),
        after=LayerNorm(hidden),
        pool=Pooler(hidden, c.text("pooler_act"), width) if pooler else None,
    )


def _first(states: Tensor) -> Tensor:
    return ops.select(states, 1)


def _first_and_mean(states: Tensor, registers: int = 0) -> Tensor:
    """The class token, and after it the mean of the patches [b, 2·h]."""
    first = ops.select(states, 1)
    patches = ops.narrow(states, 1, states.shape[1] - 1 - registers)
    return ops.cat([first, ops.mean(patches, 1, keepdim=False)], 1)


def vit(c: Config, architecture: str | None) -> Network:
    """ViT."""
    hidden = c.integer("hidden_size")
    return image_network(c, architecture, lambda pooler: _vit_tower(c, pooler=pooler), _first, hidden)


def msn(c: Config, architecture: str | None) -> Network:
    """ViT-MSN: ViT without a pooler."""
    return image_network(c, architecture, lambda _: _vit_tower(c), _first, c.integer("hidden_size"))


class DeiTWithTeacher(Network):
    """DeiT with two heads, the mean of whose scores it answers with. Transformers gives it no loss."""

    reads_text = False

    def __init__(self, c: Config, hidden: int) -> None:
        self.model = _vit_tower(c, distilled=True)
        self.cls_classifier = class_scores(c, hidden)
        self.distillation_classifier = class_scores(c, hidden)
        self.config = c

    def forward(self, batch: Batch) -> Outputs:
        """Scores [b, classes]."""
        states, _, _ = self.model(batch.pixels(self.config))
        first = self.cls_classifier(ops.select(states, 1))
        second = self.distillation_classifier(ops.select(states, 1))
        return Outputs(None, (ops.mul_scalar(ops.add(first, second)), first, second))


def deit(c: Config, architecture: str | None) -> Network:
    """DeiT with a distillation token."""
    hidden = c.integer("hidden_size")
    return image_network(
        c,
        architecture,
        lambda pooler: _vit_tower(c, distilled=True, pooler=pooler),
        _first,
        hidden,
        {"ForImageClassificationWithTeacher": lambda: DeiTWithTeacher(c, hidden)},
    )


def dinov2(c: Config, architecture: str | None) -> Network:
    """DINOv2: ViT whose branches are scaled by trained factors, with register tokens or without."""
    hidden, registers = c.integer("hidden_size"), c.integer("num_register_tokens", minimum=0)
    width = int(hidden * c.factor("mlp_ratio"))

    def mlp() -> Module:
        if c.flag("use_swiglu_ffn"):
            return GatedMLP(hidden, (int(width * 2 / 3) + 7) // 8 * 8, "silu", bias=True)
        return PlainMLP(hidden, width, c.text("hidden_act"), names=("fc1", "fc2"), bias=True)

    def block(_: int) -> Module:
        parts = {
            "norm1": LayerNorm(hidden),
            "attention": _attention(c, hidden, own_dtype=True),
            "layer_scale1": LayerScale(hidden),
            "norm2": LayerNorm(hidden),
            "mlp": mlp(),
            "layer_scale2": LayerScale(hidden),
        }
        return VisionBlock(
            parts,
            ("norm1", "attention", "norm2", "mlp"),
            scales=("layer_scale1", "layer_scale2"),
            path_dropout=c.probability("drop_path_rate"),
        )

    tower = VisionTower(
        TokenEmbeddings(c, hidden, masked=c.flag("use_mask_token"), registers=registers),
        Stack(["layer"] * c.integer("num_hidden_layers"), block),
        after=LayerNorm(hidden),
    )
    reduce = partial(_first_and_mean, registers=registers)
    return image_network(c, architecture, lambda _: tower, reduce, 2 * hidden)


VIT_DEFAULTS = vit_sizes(
    (768, 3072, 12, 12, 224, 16, 3),
    hidden_act="gelu",
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
    qkv_bias=True,
    pooler_act="tanh",
)
_DINOV2 = VIT_DEFAULTS | {
    "patch_size": 14,
    "mlp_ratio": 4,
    "drop_path_rate": 0.0,
    "use_mask_token": True,
    "num_register_tokens": 0,
}
_REGISTERS = {"patch_size": 16, "num_register_tokens": 4}

FAMILIES = table(
    Family("vit", vit, VIT_DEFAULTS, blocks="encoder"),
    Family("vit_msn", msn, VIT_DEFAULTS, blocks="encoder", verified="measured rows"),
    Family("deit", deit, VIT_DEFAULTS, blocks="encoder"),
    Family("dinov2", dinov2, _DINOV2, blocks="encoder"),
    Family("dinov2_with_registers", dinov2, _DINOV2 | _REGISTERS, blocks="encoder"),
)
