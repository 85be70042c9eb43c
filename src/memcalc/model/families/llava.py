"""Decoders with CLIP's or SigLIP's tower in front of them: LLaVA, Gemma 3, PaliGemma."""

from __future__ import annotations

from memcalc.errors import ConfigError
from memcalc.model import ops
from memcalc.model.config import Config
from memcalc.model.families import Family
from memcalc.model.module import Module, Parameter
from memcalc.model.multimodal import (
    Eye,
    Sight,
    VisionLanguage,
    check_size,
    chosen,
    language_model,
    pieces,
    tied_anywhere,
)
from memcalc.model.network import Network
from memcalc.model.sublayers.linear import Linear
from memcalc.model.sublayers.mlp import activation
from memcalc.model.sublayers.norms import GemmaRMSNorm
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
        """As many as there are patches."""
        check_size(self.config, size)
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


class PooledEye(Eye):
    """Gemma 3's: patches pooled to a square of tokens, normalised, and multiplied by a matrix."""

    def __init__(self, c: Config, v: Config, width: int) -> None:
        self.config = v
        hidden = v.integer("hidden_size")
        self.side = int(c.integer("mm_tokens_per_image") ** 0.5)
        self.kernel = grid_of(v)[0] // self.side
        if not self.kernel:
            raise ConfigError(
                f"{c.where} has 'mm_tokens_per_image' {self.side**2}, more than an image has patches; correct one."
            )
        self.vision_tower = tower_of(v)
        self.mm_input_projection_weight = Parameter(hidden, width)
        self.mm_soft_emb_norm = GemmaRMSNorm(hidden)

    def tokens(self, size: int | None) -> int:
        """The square of the side."""
        check_size(self.config, size)
        return self.side**2

    def forward(self, pixels: Tensor) -> Sight:
        """Pixels [images, c, height, width] to features [images, tokens, width]."""
        states, _pooled, _kept = self.vision_tower(pixels)
        return Sight(self._projected(states), (states,))

    def _projected(self, states: Tensor) -> Tensor:
        images, _patches, hidden = states.shape
        grid = ops.transpose(states, 1, 2)
        grid = ops.reshape(grid, images, hidden, grid_of(self.config)[0], -1)
        grid = ops.contiguous(grid)
        pooled = ops.average_pool(grid, self.kernel)
        pooled = ops.transpose(ops.view(pooled, *pooled.shape[:2], -1), 1, 2)
        normed = self.mm_soft_emb_norm(pooled)
        projected = ops.matmul(normed, self.mm_input_projection_weight)
        return ops.to(projected, states.dtype)


class LinearEye(Eye):
    """PaliGemma's: one linear layer."""

    def __init__(self, v: Config, width: int) -> None:
        self.config = v
        height, columns = grid_of(v)
        self.count = height * columns
        self.vision_tower = tower_of(v)
        self.linear = Linear(v.integer("hidden_size"), width, bias=True)

    def tokens(self, size: int | None) -> int:
        """As many as there are patches."""
        check_size(self.config, size)
        return self.count

    def forward(self, pixels: Tensor) -> Sight:
        """Pixels [images, c, height, width] to features [images, tokens, width]."""
        states, _pooled, _kept = self.vision_tower(pixels)
        return Sight(self.linear(states), (states,))


def gemma3(c: Config, architecture: str | None) -> Network:
    """Gemma 3 with SigLIP."""
    text = language_model(c, "gemma3_text", tied=c.flag("tie_word_embeddings"))
    eye = PooledEye(c, vision_config(c, "siglip_vision_model"), text.model.lm_head.weight.shape[1])
    as_tower(eye)
    return VisionLanguage(eye, text, mutual=True, own_cache=True)


def paligemma(c: Config, architecture: str | None) -> Network:
    """PaliGemma 1 (Gemma) and 2 (Gemma 2)."""
    v = vision_config(c, "siglip_vision_model", _PALI_TOWER)
    text = language_model(c, "gemma", tied=c.flag("tie_word_embeddings"), bends=True)
    eye = LinearEye(v, v.integer("projection_dim", c.integer("projection_dim")))
    as_tower(eye)
    return VisionLanguage(eye, text, mutual=True, own_cache=True)


def llava(c: Config, architecture: str | None) -> Network:
    """LLaVA 1.5."""
    v = vision_config(c, "clip_vision_model", _LLAVA_TOWER if not c.section("vision_config") else None)
    text = language_model(c, "llama", tied=tied_anywhere(c))
    eye = LlavaEye(c, v, text.model.lm_head.weight.shape[1])
    as_tower(eye)
    return VisionLanguage(eye, text)


_LLAVA_TOWER: dict[str, object] = {
    "intermediate_size": 4096, "hidden_size": 1024, "patch_size": 14, "image_size": 336, "num_hidden_layers": 24,
    "num_attention_heads": 16,
}  # fmt: skip

_PALI_TOWER: dict[str, object] = {
    "intermediate_size": 4096, "hidden_size": 1152, "patch_size": 14, "image_size": 224, "num_hidden_layers": 27,
    "num_attention_heads": 16, "vision_use_head": False,
}  # fmt: skip

FAMILIES = {
    "gemma3": Family("gemma3", gemma3, {
        "mm_tokens_per_image": 256, "tie_word_embeddings": True,
    }, attention="eager, sdpa", verified="measured rows, exact counts"),
    "paligemma": Family("paligemma", paligemma, {
        "projection_dim": 2048, "tie_word_embeddings": True,
    }, attention="eager, sdpa", verified="measured rows, exact counts"),
    "llava": Family("llava", llava, {
        "projector_hidden_act": "gelu", "vision_feature_select_strategy": "default", "vision_feature_layer": -2,
        "multimodal_projector_bias": True, "tie_word_embeddings": False,
    }, verified="measured rows, exact counts"),
}  # fmt: skip
