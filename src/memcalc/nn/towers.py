"""Towers: models inside a larger model, whose weights and memory are shown under a name of their own."""

from __future__ import annotations

from typing import TypeVar

from memcalc.nn.module import Module

VISION = "vision"
"""Group of the weights of a vision tower inside a larger model."""


_M = TypeVar("_M", bound=Module)


def as_tower(tower: _M, group: str = VISION, scope: str = "vision tower") -> _M:
    """A tower inside a larger model: its weights and its memory are shown under one name."""
    for _, parameter in tower.tensors():
        parameter.group = group
    for _, module in tower.modules():
        module.scope = scope
    return tower
