"""What eyes are made of: towers by the model type of a vision config, and projectors to the decoder's width."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from memcalc.autograd.tensor import Tensor
from memcalc.common.escaping import quoted
from memcalc.config.reader import Config
from memcalc.errors import ConfigError
from memcalc.models.vision_towers.clip_siglip import CLIP_VISION, SIGLIP_VISION, clip_vision, siglip_vision
from memcalc.models.vision_towers.pixtral import PIXTRAL, PixtralTower
from memcalc.nn.layers.linear import Linear
from memcalc.nn.layers.mlp import activation
from memcalc.nn.module import Module

_TOWERS: dict[str, tuple[Callable[..., Module], dict[str, object]]] = {
    "clip_vision_model": (clip_vision, CLIP_VISION),
    "siglip_vision_model": (siglip_vision, SIGLIP_VISION),
    "pixtral": (PixtralTower, PIXTRAL),
}


def vision_config(c: Config, default: str, given: dict[str, object] | None = None) -> Config:
    """The vision config, with the defaults of its `model_type`, or with those `given` where it is left out whole."""
    kind = str(c.section("vision_config").get("model_type", default))
    if kind not in _TOWERS:
        raise ConfigError(f"{c.where} has a vision tower {quoted(kind)}; known here are {', '.join(_TOWERS)}.")
    return c.nested("vision_config", {**_TOWERS[kind][1], "model_type": kind, **(given or {})})


def tower_of(v: Config, keep: tuple[int, ...] = ()) -> Any:
    """The tower of a vision config. `keep` are the indices of states between blocks that it gives as well."""
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
        return self.linear_2(hidden)
