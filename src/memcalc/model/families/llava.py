"""Decoders with CLIP's or SigLIP's tower in front of them: LLaVA, Gemma 3, PaliGemma."""

from __future__ import annotations

from memcalc.errors import ConfigError
from memcalc.model import ops
from memcalc.model.config import Config
from memcalc.model.families import Family
from memcalc.model.module import Module
from memcalc.model.multimodal import Eye, Sight, VisionLanguage, chosen, language_model, pieces, tied_anywhere
from memcalc.model.network import Network
from memcalc.model.sublayers.linear import Linear
from memcalc.model.sublayers.mlp import activation
from memcalc.model.sublayers.vision import VisionTower, as_tower, grid_of
from memcalc.model.tensor import Tensor
from memcalc.model.towers import CLIP_VISION, SIGLIP_VISION, clip_vision, siglip_vision

_TOWERS = {
    "clip_vision_model": (clip_vision, CLIP_VISION),
    "siglip_vision_model": (siglip_vision, SIGLIP_VISION),
}


def vision_config(c: Config, default: str, given: dict[str, object] | None = None) -> Config:
    """The vision config, with the defaults of its `model_type`, or with those `given` where it is left out whole."""
    kind = str(c.section("vision_config").get("model_type", default))
    if kind not in _TOWERS:
        raise ConfigError(f"{c.where} has a vision tower {kind[:40]!r}; known here are {', '.join(_TOWERS)}.")
    return c.nested("vision_config", {**_TOWERS[kind][1], "model_type": kind, **(given or {})})


def tower_of(v: Config, keep: tuple[int, ...] = ()) -> VisionTower:
    """The tower of a vision config."""
    return _TOWERS[v.text("model_type")][0](v, keep)


class Projector(Module):
    """linear_2(act(linear_1(x)))."""

    def __init__(self, inputs: int, outputs: int, act: str, *, bias: bool) -> None:
        self.linear_1 = Linear(inputs, outputs, bias=bias)
        self.act = activation(act)
        self.linear_2 = Linear(outputs, outputs, bias=bias)

    def forward(self, features: Tensor) -> Tensor:
        """[..., inputs] to [..., outputs]."""
        hidden = self.linear_1(features)
        hidden = self.act(hidden)
        return self.linear_2(hidden)  # type: ignore[no-any-return]


class LlavaEye(Eye):
    """States of chosen layers, without the class token where the strategy is "default", through a projector."""

    def __init__(self, c: Config, v: Config, width: int) -> None:
        self.config = v
        depth = v.integer("num_hidden_layers")
        keep = chosen(c.get("vision_feature_layer"), depth, c.where)
        self.several = isinstance(c.get("vision_feature_layer"), (list, tuple))
        self.cuts = c.text("vision_feature_select_strategy") == "default"
        self.vision_tower = tower_of(v, keep)
        height, columns = grid_of(v)
        self.count = height * columns + (v.text("model_type") == "clip_vision_model") - self.cuts
        inputs = v.integer("hidden_size") * len(keep)
        self.multi_modal_projector = Projector(
            inputs, width, c.text("projector_hidden_act"), bias=c.flag("multimodal_projector_bias")
        )

    def tokens(self, size: int | None) -> int:
        """As many as there are patches: the config decides the size of images."""
        return self.count

    def forward(self, pixels: Tensor) -> Sight:
        """Pixels [images, c, height, width] to features, one tensor for each image."""
        states, _pooled, kept = self.vision_tower(pixels)
        del _pooled
        selected = [ops.narrow(state, 1, state.shape[1] - 1) if self.cuts else state for state in kept]
        joined = ops.cat(selected, -1) if self.several else selected[0]
        features = self.multi_modal_projector(joined)
        found = pieces(features)
        return Sight(found, (states, kept))


def llava(c: Config, architecture: str | None) -> Network:
    """LLaVA 1.5."""
    v = vision_config(c, "clip_vision_model", _LLAVA_TOWER if not c.section("vision_config") else None)
    text = language_model(c, "llama", tied=tied_anywhere(c))
    eye = LlavaEye(c, v, text.lm_head.weight.shape[1])
    as_tower(eye)
    return VisionLanguage(eye, text)


_LLAVA_TOWER: dict[str, object] = {
    "intermediate_size": 4096, "hidden_size": 1024, "patch_size": 14, "image_size": 336, "num_hidden_layers": 24,
    "num_attention_heads": 16,
}  # fmt: skip

FAMILIES = {
    "llava": Family("llava", llava, {
        "projector_hidden_act": "gelu", "vision_feature_select_strategy": "default", "vision_feature_layer": -2,
        "multimodal_projector_bias": True, "tie_word_embeddings": False,
    }, verified="measured rows, exact counts"),
}  # fmt: skip
