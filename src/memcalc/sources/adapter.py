"""PEFT adapters: small weights that need a base model."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from memcalc.sources.checkpoint.checkpoint import Checkpoint


@dataclass(frozen=True)
class Adapter:
    """What adapter_config.json (`config`) and the adapter's weights say; `rank` is None for kinds without one.

    `kind` is PEFT's name in capitals. `weights` is None when only a pickle holds them; their size is never the model's.
    """

    base_model: str | None
    kind: str
    rank: int | None
    targets: tuple[str, ...]
    modules_to_save: tuple[str, ...]
    weights: Checkpoint | None
    config: Mapping[str, Any] = field(default_factory=dict)

    @property
    def parameters(self) -> int | None:
        """Parameters of the adapter, saved copies of whole modules included."""
        return self.weights.parameters if self.weights else None

    @property
    def largest_layer(self) -> int:
        """Weights of the largest layer that has a LoRA: its inputs times its outputs; 0 where none is told."""
        shapes = {} if self.weights is None else self.weights.shapes
        sizes = [0]
        for name, first in shapes.items():
            second = shapes.get(name.replace(".lora_A.", ".lora_B."), ())
            if ".lora_A." in name and len(first) == len(second) == 2:
                sizes.append(first[1] * second[0])
        return max(sizes)


MERGING = {"fp32": 8}
"""Bytes for each weight of a layer while PEFT 0.21's `merge_and_unload` adds its LoRA, by the dtype of the base.

16 in 16 bits, whose adapters are in fp32. Measured with PyTorch's allocator: 16.0 and 8.0 bytes of the largest layer.
"""


def adapter_from(config: Mapping[str, Any], weights: Checkpoint | None) -> Adapter:
    """The adapter that the object of an adapter_config.json describes."""
    base = config.get("base_model_name_or_path")
    rank = config.get("r")
    return Adapter(
        base if isinstance(base, str) and base.strip() else None,
        _kind(config.get("peft_type")),
        rank if type(rank) is int and rank > 0 else None,
        _names(config.get("target_modules")),
        _names(config.get("modules_to_save")),
        weights,
        config,
    )


def _kind(value: Any) -> str:
    return value.strip().upper().replace("-", "_")[:40] if isinstance(value, str) and value.strip() else "unknown"


def _names(value: Any) -> tuple[str, ...]:
    """A list of module names, or one pattern such as "all-linear"."""
    if isinstance(value, str):
        return (value,)
    return tuple(str(item) for item in value) if isinstance(value, list | tuple) else ()
