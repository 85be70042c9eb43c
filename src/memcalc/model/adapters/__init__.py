"""What is done to a built model before it is trained: what is frozen, what is added beside it."""

from __future__ import annotations

from memcalc.errors import UsageError
from memcalc.model.adapters.lora import LoraEmbedding, LoraLinear
from memcalc.model.adapters.saved_modules import save_modules
from memcalc.model.adapters.sites import (
    Site,
    input_embedding,
    linear_names,
    matches,
    output_head,
    sites,
    split_names,
)
from memcalc.model.module import Module
from memcalc.model.network import Network
from memcalc.model.sublayers.linear import Conv1D, Embedding, Linear
from memcalc.setup import TrainingSetup
from memcalc.tables.dtypes import ALIASES
from memcalc.tables.lora_targets import default_targets


def adapt(network: Network, model_type: str, setup: TrainingSetup) -> list[str]:
    """Freeze and extend `network`, unbound, as `setup` asks; returns what should be said under Assumptions."""
    if setup.lora_rank is None:
        return []
    return add_lora(network, model_type, setup, setup.lora_rank)


def add_lora(network: Network, model_type: str, setup: TrainingSetup, rank: int) -> list[str]:
    """Freeze everything and put adapters of `rank` beside the layers that `setup` targets."""
    for _, parameter in network.tensors():
        parameter.trainable = False
    found = sites(network)
    embedding = input_embedding(found)
    targeted = _targeted(found, model_type, setup)
    _check_rank(targeted, rank)
    for site in targeted:
        site.replace(_adapted(site.module, setup, rank))
    if setup.lora_bias in ("all", "lora-only"):
        _train_biases(network, only_adapted=setup.lora_bias == "lora-only")
    if setup.modules_to_save is not None:
        save_modules(network, setup.modules_to_save)
    if setup.activation_checkpointing != "none" and embedding is not None:
        embedding.output_needs_gradient = True
    return []


def _targeted(found: list[Site], model_type: str, setup: TrainingSetup) -> list[Site]:
    """The modules that get an adapter."""
    targets = setup.lora_targets
    saved = split_names(setup.modules_to_save or "")
    candidates = [site for site in found if not any(part in saved for part in site.name.split("."))]
    if targets is not None and targets.lower() == "all-linear":
        head = output_head(found)
        chosen = [site for site in candidates if isinstance(site.module, (Linear, Conv1D)) and site.module is not head]
    else:
        names = (
            split_names(targets) if targets is not None else frozenset(default_targets(model_type, linear_names(found)))
        )
        chosen = [site for site in candidates if matches(site.name, names)]
    if not chosen:
        raise UsageError(
            f"--lora-targets {targets or 'default'} matches no module of this model; its linear modules are "
            f"{linear_names(found)}."
        )
    for site in chosen:
        if not isinstance(site.module, (Linear, Conv1D, Embedding)):
            raise UsageError(
                f"--lora-targets names {site.leaf!r}, which is no linear layer or embedding, so it cannot have an "
                f"adapter; linear modules are {linear_names(found)}."
            )
    return chosen


def _check_rank(targeted: list[Site], rank: int) -> None:
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
        outputs, inputs = module.weight.shape
    else:
        assert isinstance(module, (Conv1D, Embedding))
        inputs, outputs = module.weight.shape
    return inputs, outputs


def _adapted(module: Module, setup: TrainingSetup, rank: int) -> Module:
    dtype = ALIASES[setup.lora_dtype]
    if isinstance(module, Embedding):
        return LoraEmbedding(module, rank, dtype=dtype)
    inputs, outputs = shape_of(module)
    return LoraLinear(
        module, inputs, outputs, rank, dtype=dtype, dropout=setup.lora_dropout, bias=setup.lora_bias == "adapter",
        dora=setup.dora,
    )  # fmt: skip


def _train_biases(network: Module, *, only_adapted: bool) -> None:
    for _, module in network.modules():
        if isinstance(module, LoraLinear) or not only_adapted:
            holder = module.base_layer if isinstance(module, LoraLinear) else module
            for name, parameter in holder.own():
                if name == "bias":
                    parameter.trainable = True
