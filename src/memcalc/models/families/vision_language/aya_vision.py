"""Aya Vision and Command A Vision: SigLIP's patches side by side through a gated projection, in front of Command."""

from __future__ import annotations

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.config.reader import Config
from memcalc.errors import ConfigError
from memcalc.models.common.vision_encoder import ImageFeatures, VisionEncoder, feature_layers
from memcalc.models.common.vision_language import VisionLanguage, is_tied, language_model
from memcalc.models.family import Family, table, vit_sizes
from memcalc.models.vision_towers.registry import tower_of, vision_config
from memcalc.nn.layers.linear import Linear
from memcalc.nn.layers.norms import LayerNorm
from memcalc.nn.layers.vision_transformer import grid_of
from memcalc.nn.model import Network
from memcalc.nn.module import Module
from memcalc.nn.towers import as_tower


class ShufflingProjector(Module):
    """Squares of `factor` by `factor` patches side by side, maybe a LayerNorm, and SwiGLU to the decoder's width."""

    def __init__(self, hidden: int, inner: int, width: int, factor: int, *, normed: bool) -> None:
        self.factor = factor
        self.layernorm = LayerNorm(hidden * factor**2) if normed else None
        self.linear_1 = Linear(hidden * factor**2, inner, bias=True)
        self.linear_2 = Linear(inner // 2, width, bias=True)

    def forward(self, features: Tensor) -> Tensor:
        """[images, n, h] to [images, rows, columns, width]."""
        features = self._shuffled(features)
        if self.layernorm is not None:
            features = self.layernorm(features)
        hidden = self.linear_1(features)
        first, gate = ops.chunk(hidden, 2, -1)
        hidden = ops.mul(ops.silu(gate), first)
        return self.linear_2(hidden)

    def _shuffled(self, features: Tensor) -> Tensor:
        images, count, channels = features.shape
        side, factor = int(count**0.5), self.factor
        features = ops.reshape(features, images, side, side // factor, channels * factor)
        features = ops.permute(features, 0, 2, 1, 3)
        features = ops.reshape(features, images, side // factor, side // factor, -1)
        return ops.permute(features, 0, 2, 1, 3)


class AyaVisionEncoder(VisionEncoder):
    """States of one layer of the tower, or with `last` what its final norm gives, through the projector."""

    def __init__(self, c: Config, v: Config, width: int, *, last: bool) -> None:
        self.config, self.last = v, last
        keep = feature_layers(c.get("vision_feature_layer"), v.integer("num_hidden_layers"), c.where)
        if c.text("vision_feature_select_strategy") == "default" or len(keep) > 1:
            raise ConfigError(
                f"{c.where} asks for several 'vision_feature_layer' or for the 'default' strategy, which memcalc does "
                "not describe for aya_vision; take one layer and 'full'."
            )
        rows, columns = grid_of(v)
        factor = c.integer("downsample_factor")
        if rows != columns or rows % factor:
            raise ConfigError(
                f"{c.where} has {rows} x {columns} patches, which squares of 'downsample_factor' {factor} do not "
                "cover; correct one."
            )
        self.count = (rows // factor) ** 2
        self.vision_tower = tower_of(v, () if last else keep)
        inner = c.integer("alignment_intermediate_size", width)
        self.multi_modal_projector = ShufflingProjector(v.integer("hidden_size"), inner, width, factor, normed=not last)

    def forward(self, pixels: Tensor) -> ImageFeatures:
        """Pixels [images, c, height, width] to features [images, tokens, width]."""
        states, _pooled, kept = self.vision_tower(pixels)
        del _pooled
        features = self.multi_modal_projector(states if self.last else kept[0])
        features = ops.reshape(features, features.shape[0], -1, features.shape[-1])
        return ImageFeatures(features, (states, kept))


def aya_vision(c: Config, architecture: str | None) -> Network:
    """Aya Vision 8B and 32B."""
    return _seeing(c, _TOWER, last=False)


def cohere2_vision(c: Config, architecture: str | None) -> Network:
    """Command A Vision."""
    return _seeing(c, _LARGE_TOWER, last=True)


def _seeing(c: Config, tower: dict[str, object], *, last: bool) -> Network:
    v = vision_config(c, "siglip_vision_model", tower if not c.section("vision_config") else None)
    text = language_model(c, "cohere2", tied=is_tied(c))
    encoder = AyaVisionEncoder(c, v, text.model.lm_head.weight.shape[1], last=last)
    as_tower(encoder)
    return VisionLanguage(encoder, text, own_cache=True)


_LARGE_TOWER: dict[str, object] = vit_sizes((1152, 3072, 27, 12, 512, 0, 0))
_TOWER: dict[str, object] = vit_sizes((1152, 4304, 26, 14, 384, 14, 0), vision_use_head=False)

FAMILIES = table(
    Family(
        "aya_vision",
        aya_vision,
        {
            "vision_feature_select_strategy": "full",
            "vision_feature_layer": -1,
            "downsample_factor": 2,
            "tie_word_embeddings": True,
        },
        kinds="vision tower, decoder",
    ),
    Family(
        "cohere2_vision",
        cohere2_vision,
        {
            "vision_feature_select_strategy": "full",
            "vision_feature_layer": -1,
            "downsample_factor": 2,
            "alignment_intermediate_size": 36864,
            "tie_word_embeddings": True,
        },
        kinds="vision tower, decoder",
    ),
)
