"""LLaVA: a decoder with CLIP's or another tower in front of it, and an MLP between them."""

from __future__ import annotations

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.config.reader import Config
from memcalc.errors import ConfigError
from memcalc.models.common.vision_encoder import (
    DynamicResolutionEncoder,
    ImageFeatures,
    VisionEncoder,
    config_side,
    feature_layers,
    per_image,
)
from memcalc.models.common.vision_language import VisionLanguage, is_tied, language_model
from memcalc.models.family import Family, table, vit_sizes
from memcalc.models.vision_towers.registry import Projector, tower_of, vision_config
from memcalc.nn.layers.norms import LayerNorm
from memcalc.nn.layers.vision_transformer import grid_of
from memcalc.nn.model import Network
from memcalc.nn.module import Module
from memcalc.nn.towers import as_tower


class LlavaVisionEncoder(VisionEncoder):
    """States of chosen layers, without the class token where the strategy is "default", through a projector."""

    def __init__(self, c: Config, v: Config, width: int) -> None:
        self.config = v
        depth = v.integer("num_hidden_layers")
        keep = feature_layers(c.get("vision_feature_layer"), depth, c.where)
        self.normed = c.text("model_type") == "vipllava"
        self.several = isinstance(c.get("vision_feature_layer"), (list, tuple))
        self.cuts = c.text("vision_feature_select_strategy") == "default"
        self.vision_tower = tower_of(v, keep)
        height, columns = grid_of(v)
        self.count = height * columns + (v.text("model_type") == "clip_vision_model") - self.cuts
        if self.normed:
            self.multi_modal_projector: Module = NormedProjector(c, v, width, len(keep))
        else:
            self.multi_modal_projector = projector(c, v, width, len(keep))

    def forward(self, pixels: Tensor) -> ImageFeatures:
        """Pixels [images, c, height, width] to features, one tensor for each image."""
        states, _pooled, kept = self.vision_tower(pixels)
        del _pooled
        selected = [ops.narrow(state, 1, state.shape[1] - 1) if self.cuts else state for state in kept]
        joined = ops.cat(selected, -1) if self.several else selected[0]
        features = self.multi_modal_projector(joined)
        if self.normed:
            return ImageFeatures(features, (states, kept))
        found = per_image(features)
        return ImageFeatures(found, (states, kept))


class NormedProjector(Projector):
    """A LayerNorm before the MLP (ViP-LLaVA)."""

    def __init__(self, c: Config, v: Config, width: int, states: int) -> None:
        inputs = v.integer("hidden_size") * states
        self.projector_layernorm = LayerNorm(inputs)
        super().__init__(inputs, width, c.text("projector_hidden_act"), bias=True)

    def forward(self, features: Tensor) -> Tensor:
        """[..., inputs] to [..., outputs]."""
        return super().forward(self.projector_layernorm(features))


class LlavaPixtralVisionEncoder(DynamicResolutionEncoder):
    """LLaVA's with Pixtral's tower: one sequence of patches for all images, split into images after the projector."""

    def __init__(self, c: Config, v: Config, width: int) -> None:
        super().__init__(v, v.integer("patch_size"), config_side(v))
        keep = feature_layers(c.get("vision_feature_layer"), v.integer("num_hidden_layers"), c.where)
        self.several = isinstance(c.get("vision_feature_layer"), (list, tuple))
        if c.text("vision_feature_select_strategy") == "default":
            raise ConfigError(
                f"{c.where} gives 'vision_feature_select_strategy' as 'default', which drops a class token; Pixtral's "
                f"tower has none; correct it to 'full'."
            )
        self.vision_tower = tower_of(v, keep)
        self.multi_modal_projector = projector(c, v, width, len(keep))

    def forward(self, pixels: Tensor) -> ImageFeatures:
        """Pixels [images, c, height, width] to features, one tensor for each image."""
        states, _pooled, kept = self.vision_tower(pixels)
        del _pooled
        joined = ops.cat(kept, -1) if self.several else kept[0]
        features = self.multi_modal_projector(joined)
        images = pixels.shape[0]
        found = ops.split(ops.squeeze(features, 0), [features.shape[1] // images] * images, 0)
        return ImageFeatures(found, (states, kept))


def projector(c: Config, v: Config, width: int, states: int) -> Projector:
    """The MLP from so many of a tower's states to the decoder's width."""
    inputs = v.integer("hidden_size") * states
    return Projector(inputs, width, c.text("projector_hidden_act"), bias=c.flag("multimodal_projector_bias"))


def llava(c: Config, architecture: str | None) -> Network:
    """LLaVA 1.5."""
    v = vision_config(c, "clip_vision_model", _LLAVA_TOWER if not c.section("vision_config") else None)
    text = language_model(c, "llama", tied=is_tied(c))
    vision_encoder = (LlavaPixtralVisionEncoder if v.text("model_type") == "pixtral" else LlavaVisionEncoder)(
        c, v, text.model.lm_head.weight.shape[1]
    )
    as_tower(vision_encoder)
    return VisionLanguage(vision_encoder, text, own_cache=True)


_LLAVA_TOWER: dict[str, object] = vit_sizes((1024, 4096, 24, 16, 336, 14, 0))

FAMILIES = table(
    Family(
        "llava",
        llava,
        {
            "projector_hidden_act": "gelu",
            "vision_feature_select_strategy": "default",
            "vision_feature_layer": -2,
            "multimodal_projector_bias": True,
            "tie_word_embeddings": False,
        },
        kinds="vision tower, decoder",
    ),
    Family(
        "vipllava",
        llava,
        {
            "projector_hidden_act": "gelu",
            "vision_feature_select_strategy": "default",
            "vision_feature_layer": [-2, -5, -8, -11, 6],
            "tie_word_embeddings": False,
        },
        {"vision_feature_layers": "vision_feature_layer"},
        kinds="vision tower, decoder",
    ),
)
