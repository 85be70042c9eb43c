"""Weights as a checkpoint stores them, where its headers tell."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from memcalc.tables.weight_formats import WeightFormat

GGUF = "GGUF"


@dataclass(frozen=True)
class StoredWeights:
    """`packed` are bytes by type that are loaded as they are stored: quantized weights and their constants, buffers.

    `unpacked` counts the parameters that are loaded in the dtype of the run; `dtype` is the one they are stored in,
    under its short name, where it is a common one. `kind` names the format: GGUF, or the quantization's method; empty
    where nothing is packed. `exact` says that these bytes stand for all weights though shapes are only alike.
    """

    kind: str = ""
    packed: Mapping[str, int] = field(default_factory=dict)
    unpacked: int = 0
    dtype: str | None = None
    exact: bool = False
    places: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """Bytes of a GGUF file's weights by place ("embedding", "head", "layer 3", "experts 3", "other") and type."""
    modules: Mapping[str, WeightFormat] = field(default_factory=dict)
    """The type of each quantized linear layer of a denoiser's GGUF file, by the layer's name."""
