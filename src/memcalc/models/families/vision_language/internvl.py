"""InternVL: a tower with layer scales, squares of patches side by side through an MLP, and a decoder."""

from __future__ import annotations

from collections.abc import Callable

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.config.reader import Config
from memcalc.errors import ConfigError
from memcalc.models.common.vision_encoder import ImageFeatures, VisionEncoder, feature_layers
from memcalc.models.common.vision_language import VisionLanguage, language_model
from memcalc.models.family import Family, table, vit_sizes
from memcalc.models.vision_towers.registry import Projector
from memcalc.nn.layers.mlp import PlainMLP
from memcalc.nn.layers.norms import LayerNorm, RMSNorm
from memcalc.nn.layers.vision_transformer import (
    PatchEmbedding,
    VisionAttention,
    VisionTower,
    grid_of,
    kinds_of,
    pixel_shuffle,
)
from memcalc.nn.model import Network
from memcalc.nn.module import Module, Parameter
from memcalc.nn.stack import Stack
from memcalc.nn.towers import as_tower

NAMES = ("q_proj", "k_proj", "v_proj", "projection_layer")


class ClassedEmbeddings(Module):
    """A class token and patches, plus a position for each."""

    scope = "embedding"

    def __init__(self, v: Config, rows: int, columns: int) -> None:
        width = v.integer("hidden_size")
        self.cls_token = Parameter(1, 1, width, group="embedding")
        self.mask_token = Parameter(1, 1, width, group="embedding") if v.flag("use_mask_token") else None
        positions = rows * columns + 1
        placed = v.flag("use_absolute_position_embeddings", True)
        self.position_embeddings = Parameter(1, positions, width, group="embedding") if placed else None
        self.patch_embeddings = PatchEmbedding(v.integer("num_channels"), width, patch_of(v))
        self.dropout = v.probability("hidden_dropout_prob")

    def forward(self, pixels: Tensor) -> Tensor:
        """Pixels [b, c, height, width] to [b, 1 + n, h]."""
        embeddings = self.patch_embeddings(pixels)
        classes = ops.expand(self.cls_token, embeddings.shape[0], -1, -1)
        embeddings = ops.cat((classes, embeddings), 1)
        if self.position_embeddings is not None:
            embeddings = ops.add(embeddings, self.position_embeddings)
        return ops.dropout(embeddings, self.dropout)


class ScaledBlock(Module):
    """Norm, attention, scale, add; norm, MLP, scale, add."""

    scope = "residual stream"

    def __init__(self, v: Config, norm: Callable[[int], Module]) -> None:
        width, heads = v.integer("hidden_size"), v.integer("num_attention_heads")
        self.lambda_1 = Parameter(width, group="norms")
        self.lambda_2 = Parameter(width, group="norms")
        self.attention = VisionAttention(
            width,
            heads,
            names=NAMES,
            bias=v.flag("attention_bias"),
            dropout=v.probability("attention_dropout"),
            together=True,
            norm=RMSNorm if v.flag("use_qk_norm") else None,
            own_dtype=True,
            out_dropout=v.probability("projection_dropout"),
        )
        act = v.text("hidden_act")
        self.mlp = PlainMLP(width, v.integer("intermediate_size"), act, names=("fc1", "fc2"), bias=True)
        self.layernorm_before = norm(width)
        self.layernorm_after = norm(width)
        self.dropout = v.probability("hidden_dropout_prob")

    def forward(self, hidden: Tensor, mask: Tensor | None) -> Tensor:
        """[b, n, h] to [b, n, h]."""
        attended, _weights = self.attention(self.layernorm_before(hidden))
        attended = ops.mul(self.lambda_1, attended)
        hidden = ops.add(attended, hidden)
        out = self.layernorm_after(hidden)
        out = self.mlp(out)
        out = ops.dropout(out, self.dropout)
        out = ops.mul(self.lambda_2, out)
        return ops.add(out, hidden)


def patch_of(v: Config) -> int:
    """Height and width of a patch, which are equal."""
    rows, columns = v.sides("patch_size")
    if rows != columns:
        raise ConfigError(f"{v.where} gives 'patch_size' as {rows} by {columns}; memcalc knows square patches only.")
    return rows


class InternVLVisionEncoder(VisionEncoder):
    """States of one layer, without the class token, put side by side by squares and through a norm and an MLP."""

    frames_per_image = 1

    def __init__(self, c: Config, v: Config, width: int) -> None:
        self.config = v
        self.square = round(1 / c.factor("downsample_ratio"))
        rows, columns = grid_of(v.replaced(patch_size=patch_of(v)))
        self.count = (rows // self.square) * (columns // self.square)
        hidden, depth = v.integer("hidden_size"), v.integer("num_hidden_layers")
        self.last = c.get("vision_feature_layer") == -1
        keep = () if self.last else feature_layers(c.get("vision_feature_layer"), depth, c.where)
        norms: dict[str, Callable[[int], Module]] = {"layer_norm": LayerNorm, "rms_norm": RMSNorm}
        norm = norms.get(v.text("norm_type"))
        if norm is None:
            raise ConfigError(f"{v.where} gives 'norm_type' as {v.text('norm_type')!r}; known are {', '.join(norms)}.")
        self.vision_tower = VisionTower(
            ClassedEmbeddings(v, rows, columns),
            Stack(kinds_of(depth, keep), lambda _: ScaledBlock(v, norm), name="vision block"),
            after=None if v.flag("use_mean_pooling") else LayerNorm(hidden),
            keep=keep,
        )
        self.cuts = c.text("vision_feature_select_strategy") == "default"
        merged = hidden * self.square**2
        self.multi_modal_projector = NormedProjector(merged, width, c.text("projector_hidden_act"))

    def forward(self, pixels: Tensor) -> ImageFeatures:
        """Pixels [images, c, height, width] to features [images, tokens, width]."""
        states, _pooled, kept = self.vision_tower(pixels)
        del _pooled
        features = states if self.last else kept[0]
        if self.cuts:
            features = ops.narrow(features, 1, features.shape[1] - 1)
        side = int(features.shape[1] ** 0.5)
        features = ops.reshape(features, features.shape[0], side, side, -1)
        features = pixel_shuffle(features, self.square)
        features = ops.reshape(features, features.shape[0], -1, features.shape[-1])
        features = self.multi_modal_projector(features)
        return ImageFeatures(features, (states, kept))


class NormedProjector(Projector):
    """A norm, and an MLP."""

    def __init__(self, inputs: int, outputs: int, act: str) -> None:
        self.layer_norm = LayerNorm(inputs)
        super().__init__(inputs, outputs, act, bias=True)

    def forward(self, features: Tensor) -> Tensor:
        """[..., inputs] to [..., outputs]."""
        hidden = self.layer_norm(features)
        hidden = self.linear_1(hidden)
        hidden = self.act(hidden)
        return self.linear_2(hidden)


def internvl(c: Config, architecture: str | None) -> Network:
    """InternVL 2.5 to 3.5, as converted to Transformers."""
    v = c.nested("vision_config", _TOWER)
    text = language_model(c, "qwen2", tied=c.flag("tie_word_embeddings"))
    vision_encoder = InternVLVisionEncoder(c, v, text.model.lm_head.weight.shape[1])
    as_tower(vision_encoder)
    return VisionLanguage(vision_encoder, text, own_cache=True)


_TOWER: dict[str, object] = vit_sizes(
    (1024, 4096, 24, 16, 0, 0, 3),
    hidden_act="gelu",
    hidden_dropout_prob=0.0,
    attention_dropout=0.0,
    projection_dropout=0.0,
    norm_type="layer_norm",
    image_size=[448, 448],
    patch_size=[14, 14],
    use_absolute_position_embeddings=True,
    use_mean_pooling=True,
)

FAMILIES = table(
    Family(
        "internvl",
        internvl,
        {
            "downsample_ratio": 0.5,
            "projector_hidden_act": "gelu",
            "vision_feature_layer": -1,
            "vision_feature_select_strategy": "default",
            "tie_word_embeddings": True,
        },
        kinds="vision tower, decoder",
    )
)
