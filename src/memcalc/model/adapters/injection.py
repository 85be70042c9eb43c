"""Putting LoRA adapters into a network: which layers get one, and what is trained beside them.

Source of the rules: peft/tuners/tuners_utils.py of PEFT 0.21.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from memcalc.errors import UsageError
from memcalc.model.adapters.lora import LoraEmbedding, LoraLinear
from memcalc.model.adapters.saved_modules import save_modules
from memcalc.model.adapters.sites import Site, linear_names, matches, output_head, sites, split_names
from memcalc.model.module import Module
from memcalc.model.sublayers.linear import Conv1D, Embedding, Linear
from memcalc.tables.dtypes import FP32, DType
from memcalc.tables.lora_targets import default_targets


@dataclass(frozen=True, slots=True)
class Lora:
    """PEFT's LoraConfig. `targets` are "all-linear", names with commas, or None for the family's default."""

    rank: int
    targets: str | None = None
    dtype: DType = FP32
    dropout: float = 0.0
    bias: str = "none"
    dora: bool = False
    modules_to_save: str | None = None


def add_lora(network: Module, model_type: str, lora: Lora) -> None:
    """Freeze everything and put adapters beside the layers that `lora` targets."""
    for _, parameter in network.tensors():
        parameter.trainable = False
    targeted = _targeted(sites(network), model_type, lora)
    _check_rank(targeted, lora.rank)
    for site in targeted:
        site.replace(_adapted(site.module, lora))
    if lora.bias in ("all", "lora-only"):
        _train_biases(network, only_adapted=lora.bias == "lora-only")
    if lora.modules_to_save is not None:
        save_modules(network, lora.modules_to_save)


def _targeted(found: list[Site], model_type: str, lora: Lora) -> list[Site]:
    """The modules that get an adapter. Modules that are trained in full never do."""
    targets = lora.targets
    saved = split_names(lora.modules_to_save or "")
    candidates = [site for site in found if not saved.intersection(site.name.split("."))]
    if targets is not None and targets.lower() == "all-linear":
        head = output_head(found)
        chosen = [site for site in candidates if _is_linear(site.module) and site.module is not head]
    else:
        names = frozenset(default_targets(model_type, linear_names(found))) if targets is None else split_names(targets)
        chosen = [site for site in candidates if matches(site.name, names)]
    if not chosen:
        raise UsageError(
            f"--lora-targets {targets or 'default'} matches no module of this model; its linear modules are "
            f"{linear_names(found)}."
        )
    for site in chosen:
        if not _is_linear(site.module) and not isinstance(site.module, Embedding):
            raise UsageError(
                f"--lora-targets names {site.leaf!r}, which is no linear layer or embedding, so it cannot have an "
                f"adapter; linear modules are {linear_names(found)}."
            )
    return chosen


def _is_linear(module: Module) -> bool:
    return isinstance(module, (Linear, Conv1D))


def _check_rank(targeted: Iterable[Site], rank: int) -> None:
    """Refuse a rank that no targeted matrix has."""
    largest = max(min(shape_of(site.module)) for site in targeted)
    if rank > largest:
        raise UsageError(
            f"--lora-rank {rank} exceeds every targeted matrix, of which none has a rank above {largest}; "
            "choose a smaller one, or train the model itself without --lora-rank."
        )


def shape_of(module: Module) -> tuple[int, int]:
    """Inputs and outputs of a linear layer or an embedding."""
    if isinstance(module, Linear):
        return module.inputs, module.outputs
    assert isinstance(module, (Conv1D, Embedding))
    inputs, outputs = module.weight.shape
    return inputs, outputs


def _adapted(module: Module, lora: Lora) -> Module:
    if isinstance(module, Embedding):
        return LoraEmbedding(module, lora.rank, dtype=lora.dtype)
    inputs, outputs = shape_of(module)
    return LoraLinear(
        module, inputs, outputs, lora.rank, dtype=lora.dtype, dropout=lora.dropout, bias=lora.bias == "adapter",
        dora=lora.dora,
    )  # fmt: skip


def _train_biases(network: Module, *, only_adapted: bool) -> None:
    for _, module in network.modules():
        if isinstance(module, LoraLinear) or not only_adapted:
            holder = module.base_layer if isinstance(module, LoraLinear) else module
            for name, parameter in holder.own():
                if name == "bias":
                    parameter.trainable = True
