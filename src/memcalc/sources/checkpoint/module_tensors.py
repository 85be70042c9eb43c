"""Tensors by the module that owns them, so that a packed weight finds its scales."""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from memcalc.config.quantization import Quantization
from memcalc.sources.checkpoint.safetensors import HeaderTensor

# Last parts of a name that belong to the weight before them: `q_proj.weight.absmax` is about `q_proj`'s `weight`.
_PARTS_OF_A_WEIGHT = frozenset(
    {
        "absmax",
        "quant_map",
        "nested_absmax",
        "nested_quant_map",
        "_data",
        "_scale",
        "_shift",
        "compressed",
        "bitmask",
        "row_offsets",
    }
)


@dataclass(frozen=True)
class ModuleTensors:
    """The tensors of one module, by their name inside it, with what the repository says about its quantization."""

    path: str
    leaves: Mapping[str, HeaderTensor]
    quantization: Quantization | None
    metadata: Mapping[str, str]

    def leaf(self, name: str) -> HeaderTensor | None:
        return self.leaves.get(name)

    @property
    def bits(self) -> int | None:
        return self.quantization.bits if self.quantization else None

    @property
    def group_size(self) -> int | None:
        return self.quantization.group_size if self.quantization else None

    @property
    def method(self) -> str:
        return self.quantization.method if self.quantization else ""

    @property
    def settings(self) -> Mapping[str, Any]:
        return self.quantization.settings if self.quantization else {}

    def subclass_of(self, leaf: str) -> str:
        """The tensor subclass that torchao writes into `__metadata__` for a weight; empty when there is none."""
        text = self.metadata.get(f"{self.path}.{leaf}", "")
        try:
            value = json.loads(text) if text else {}
        except ValueError:
            return ""
        return str(value.get("_type", "")) if isinstance(value, dict) else ""


def split_name(name: str) -> tuple[str, str]:
    """(module path, name inside the module)."""
    path, _, leaf = name.rpartition(".")
    if not path:
        return "", name
    of_a_weight = leaf == "shape" and path.endswith(".weight")  # of a sparse weight; HQQ's `shape` is the module's
    if of_a_weight or leaf in _PARTS_OF_A_WEIGHT or leaf.startswith("bitsandbytes__"):
        path, _, before = path.rpartition(".")
        if before in ("quant_state", "_data"):
            path, _, first = path.rpartition(".")
            before = f"{first}.{before}"
        leaf = f"{before}.{leaf}"
    return path, leaf


def by_module(
    tensors: Iterable[HeaderTensor], quantization: Quantization | None, metadata: Mapping[str, str]
) -> Iterator[ModuleTensors]:
    """Every module that owns tensors, in the order in which they first appear."""
    modules: dict[str, dict[str, HeaderTensor]] = {}
    for tensor in tensors:
        path, leaf = split_name(tensor.name)
        modules.setdefault(path, {})[leaf] = tensor
    for path, leaves in modules.items():
        yield ModuleTensors(path, leaves, quantization, metadata)
