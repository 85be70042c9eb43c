"""Pixtral's tower: the patches of all images, of whatever size, in one sequence with a mask between images."""

from __future__ import annotations

from functools import partial

from memcalc.model import ops
from memcalc.model.config import Config
from memcalc.model.module import Module, Stack
from memcalc.model.sublayers.attention import GroupedQueryAttention
from memcalc.model.sublayers.mlp import GatedMLP
from memcalc.model.sublayers.norms import RMSNorm
from memcalc.model.sublayers.packed_vision import AxialRotary
from memcalc.model.sublayers.rotary import Rotation, apply_rotary
from memcalc.model.sublayers.vision import Seen, kinds_of
from memcalc.model.tensor import Tensor
from memcalc.tables.dtypes import INT64

PIXTRAL: dict[str, object] = {
    "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16,
    "num_channels": 3, "image_size": 1024, "patch_size": 16, "hidden_act": "gelu", "attention_dropout": 0.0,
}  # fmt: skip


class PatchConvolution(Module):
    """A convolution without bias that strides as far as it is wide: [images, c, height, width] to a grid of patches."""

    def __init__(self, channels: int, hidden: int, patch: int) -> None:
        self.weight = ops_parameter(hidden, channels, patch, patch)
        self.patch = patch

    def forward(self, pixels: Tensor) -> Tensor:
        """[images, h, rows, columns]."""
        return ops.convolution(pixels, self.weight, None, stride=self.patch)
