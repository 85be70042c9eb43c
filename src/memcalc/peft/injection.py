"""Putting LoRA adapters into a network: which layers get one, and what else is trained.

Source of the rules: peft/tuners/tuners_utils.py of PEFT 0.21.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from memcalc.common.assumption import Assumption
from memcalc.errors import UsageError
from memcalc.nn.layers.linear import Conv1D, Embedding, Linear
from memcalc.nn.layers.mixture_of_experts import Experts
from memcalc.nn.module import Module
from memcalc.nn.module_paths import Site, linear_names, matches, output_head, sites, split_names
from memcalc.nn.stack import Stack
from memcalc.peft.experts import AdaptedWeight
from memcalc.peft.lora import LoraEmbedding, LoraLinear
from memcalc.peft.modules_to_save import save_modules
from memcalc.peft.selection import Selection, is_pattern
from memcalc.tables.dtypes import FP32, DType
from memcalc.tables.lora_targets import FUSED_PROJECTIONS, MIXTURES, OWN_NAMES, PARTS, REFUSED, default_targets


@dataclass(frozen=True)
class Lora:
    """PEFT's LoraConfig. `targets` are "all-linear", names with commas, or None for the family's default."""

    rank: int
    targets: str | None = None
    dtype: DType = FP32
    dropout: float = 0.0
    bias: str = "none"
    dora: bool = False
    modules_to_save: str | None = None
    exclude: str | None = None
    layers: str | None = None
    ranks: str | None = None
    parameters: str | None = None

    @property
    def selection(self) -> Selection:
        """What it says about names. Raises UsageError for patterns and lists that are none."""
        return Selection(self.rank, self.targets, self.exclude, self.layers, self.ranks)


def add_lora(network: Module, model_type: str, lora: Lora) -> list[Assumption]:
    """Freeze everything and add adapters to the layers that `lora` targets; returns the assumptions."""
    for _, parameter in network.tensors():
        parameter.trainable = False
    found = sites(network)
    lora, notes = _by_names_here(lora, model_type)
    names, fused = _in_mixtures(_names(found, model_type, lora), model_type)
    targeted = _targeted(found, names, lora)
    mixtures = _mixtures(found, fused | _parameters(lora))
    _check_matched(found, targeted, mixtures, lora)
    refused = {site.leaf for site in targeted}.intersection(REFUSED.get(model_type, ()))
    if refused:
        rest = sorted({site.leaf for site in targeted} - refused)
        raise UsageError(
            f"PEFT refuses adapters on {', '.join(sorted(refused))} of {model_type}; name the others with "
            f"--lora-targets ({','.join(rest) or 'in_proj'})."
        )
    for site in targeted:
        site.replace(_adapted(site.module, lora, lora.selection.rank_of(site.name)))
    for site, wrapped in mixtures:
        _adapt_mixture(site, wrapped, lora)
    if lora.bias in ("all", "lora-only"):
        _train_biases(network, only_adapted=lora.bias == "lora-only")
    unsaved: list[str] = []
    if lora.modules_to_save is not None:
        saved = save_modules(network, lora.modules_to_save)
        wanted = split_names(lora.modules_to_save)
        unsaved = sorted(name for name in wanted if not any(site.name.endswith(name) for site in saved))
    listed = frozenset[str]() if is_pattern(lora.targets or "") else split_names(lora.targets or "")
    idle = sorted(name for name in listed & names if not _matching(found, name))
    return [
        *notes,
        *(
            Assumption("lora_target_missing", f"no module is called {name[:40]}: it gets no adapter (--lora-targets)")
            for name in idle
        ),
        *(
            Assumption("lora_target_missing", f"no module is called {name[:40]}: it is not trained (--modules-to-save)")
            for name in unsaved
        ),
    ]


def tell_reached_apart(network: Module, model_type: str, lora: Lora) -> None:
    """Split stacks where some blocks stand before the first that is adapted: those need no gradient and save nothing.

    Call it before anything is done to the blocks, as they are built again.
    """
    found = sites(network)
    lora, _ = _by_names_here(lora, model_type)
    names, fused = _in_mixtures(_names(found, model_type, lora), model_type)
    saved = split_names(lora.modules_to_save or "")
    trained = {id(site.module) for site in _targeted(found, names, lora)}
    trained |= {id(site.module) for site, _ in _mixtures(found, fused | _parameters(lora))}
    trained |= {id(site.module) for site in found if any(site.name.endswith(name) for name in saved)}
    for _, stack in network.modules():
        if isinstance(stack, Stack) and not stack.shared:
            adapted = (
                at for at, block in stack.positions if any(id(module) in trained for _, module in block.modules())
            )
            if first := next(adapted, 0):
                stack.split([position > first for position in range(stack.depth)])


def _by_names_here(lora: Lora, model_type: str) -> tuple[Lora, list[Assumption]]:
    """Targets by the names that modules have here, where a repository's own code calls them otherwise.

    Names of projections that this code has as one mean that one, and a note says so.
    """
    own = OWN_NAMES.get(model_type, {})
    if lora.targets is None or not own or is_pattern(lora.targets):
        return lora, []
    names: list[str] = []
    parts: dict[str, list[str]] = {}
    for name in sorted(split_names(lora.targets)):
        whole = PARTS.get(name, name)
        theirs = [theirs for theirs, here in own.items() if here == whole]
        if name == "c_proj" and model_type == "qwen":  # of attention and of the MLP
            names += ["o_proj", "down_proj"]
        elif whole != name and theirs:
            parts.setdefault(theirs[0], []).append(name)
            names.append(whole)
        else:
            names.append(own.get(name, name))
    notes = [
        Assumption(
            "lora_targets_fused",
            f"{', '.join(asked)}: {model_type}'s own code has one projection, {theirs}, and PEFT finds no other; its "
            f"adapter is counted (--lora-targets {theirs})",
        )
        for theirs, asked in parts.items()
    ]
    return replace(lora, targets=",".join(dict.fromkeys(names))), notes


def _matching(found: list[Site], name: str) -> bool:
    return any(matches(site.name, frozenset((name,))) for site in found)


def _names(found: list[Site], model_type: str, lora: Lora) -> frozenset[str]:
    """The names of what gets an adapter: "all-linear" stands for every linear layer but the output head."""
    if lora.targets is None and lora.parameters is not None:
        return frozenset()
    if lora.targets is not None and is_pattern(lora.targets):
        return frozenset(site.name for site in found if re.fullmatch(lora.targets, site.name))
    if lora.targets is None:
        own = OWN_NAMES.get(model_type, {})
        return frozenset(own.get(name, name) for name in default_targets(model_type, linear_names(found)))
    if lora.targets.lower() != "all-linear":
        return split_names(lora.targets)
    head = output_head(found)
    everywhere = frozenset(site.name for site in found if _is_linear(site.module) and site.module is not head)
    if model_type not in MIXTURES:
        return everywhere
    return frozenset(name.rpartition(".")[2] for name in everywhere) | FUSED_PROJECTIONS[MIXTURES[model_type]].keys()


def _in_mixtures(names: frozenset[str], model_type: str) -> tuple[frozenset[str], frozenset[str]]:
    """The names without those that mean parts of fused experts, and the parameters that those mean.

    Gate and up projection are one tensor, so one of them alone cannot be adapted. What bears such a name elsewhere in
    the model (a dense MLP, a shared expert) gets no adapter from PEFT.
    """
    projections = FUSED_PROJECTIONS.get(MIXTURES.get(model_type, ""), {})
    ends = {name: name.rpartition(".")[2] for name in names}
    fused = {name for name in names if ends[name] in projections}
    parameters = frozenset(parameter for name in fused for parameter in projections[ends[name]])
    for parameter in parameters:
        needed = {old for old, new in projections.items() if parameter in new}
        missing = needed - set(ends.values())
        if missing:
            raise UsageError(
                f"--lora-targets names only part of the experts' fused {parameter}, which PEFT refuses; add "
                f"{', '.join(sorted(missing))}, or leave it out."
            )
    return names - fused, parameters


def _targeted(found: list[Site], names: frozenset[str], lora: Lora) -> list[Site]:
    """The modules of these names. Modules that are trained in full never get an adapter."""
    saved, selection = split_names(lora.modules_to_save or ""), lora.selection
    return [
        site
        for site in found
        if matches(site.name, names) and not saved.intersection(site.name.split(".")) and selection.allows(site.name)
    ]


def _parameters(lora: Lora) -> frozenset[str]:
    """The parameters of experts that are named themselves: PEFT's target_parameters."""
    named = {name.rpartition(".")[2]: name for name in split_names(lora.parameters or "")}
    unknown = [name for end, name in named.items() if end not in ("gate_up_proj", "down_proj")]
    if unknown:
        raise UsageError(
            f"--lora-target-parameters names {', '.join(sorted(unknown))}; memcalc adapts the experts' gate_up_proj "
            "and down_proj, such as mlp.experts.gate_up_proj."
        )
    return frozenset(named)


def _mixtures(found: list[Site], parameters: frozenset[str]) -> list[tuple[Site, list[str]]]:
    """The experts and routers whose parameters are meant, with the attributes that hold those, innermost first."""
    chosen: list[tuple[Site, list[str]]] = []
    attributes = [own for name, own in (("gate_up_proj", "up_proj"), ("down_proj", "down_proj")) if name in parameters]
    for site in found:
        if isinstance(site.module, Experts) and attributes:
            chosen.append((site, attributes))
        elif site.leaf == "gate" and "gate.weight" in parameters and hasattr(site.module, "per_token"):
            chosen.append((site, ["weight"]))
    return chosen


def _adapt_mixture(site: Site, attributes: list[str], lora: Lora) -> None:
    if lora.dora or lora.dropout or lora.bias == "adapter":
        raise UsageError(
            f"PEFT has neither dropout nor bias nor DoRA for adapters on {site.name}, a mixture of experts; leave them "
            f"out, or name only attention layers with --lora-targets."
        )
    if any(len(getattr(site.module, attribute).shape) < 2 for attribute in attributes):
        raise UsageError(
            f"the experts of {site.name} are quantized, and PEFT adapts no packed weights outside linear layers; "
            "name attention layers with --lora-targets, such as q_proj,v_proj."
        )
    module = site.module
    for attribute in attributes:
        own = lora.selection.rank_of(f"{site.name}.{_PARAMETERS.get(attribute, attribute)}")
        rank = 2 * own if attribute == "up_proj" and lora.parameters is None else own
        transposed = attribute != "weight" and getattr(site.module, "transposed", False)
        module = AdaptedWeight(module, attribute, rank, lora.dtype, transposed=transposed)
    site.replace(module)


def _check_matched(found: list[Site], targeted: list[Site], mixtures: list[tuple[Site, list[str]]], lora: Lora) -> None:
    """Refuse targets that match nothing or something else than a layer, and a rank that no targeted matrix has."""
    if not targeted and not mixtures:
        _check_left_over(found, lora)
        raise UsageError(
            f"--lora-targets {lora.targets or 'default'} matches no module of this model; its linear modules are "
            f"{linear_names(found)}."
        )
    for site in targeted:
        if not _is_linear(site.module) and not isinstance(site.module, Embedding):
            raise UsageError(
                f"--lora-targets names {site.leaf!r}, which is no linear layer or embedding, so it cannot have an "
                f"adapter; linear modules are {linear_names(found)}."
            )
    sides = [min(shape_of(site.module)) for site in targeted]
    sides += [min(getattr(site.module, name).shape[-2:]) for site, names in mixtures for name in names]
    ranks = [("--lora-rank", lora.rank), *(("--lora-rank-pattern", r) for r in lora.selection.rank_patterns().values())]
    for option, rank in ranks:
        if rank > max(sides):
            raise UsageError(
                f"{option} {rank} exceeds every targeted matrix, of which none has a rank above {max(sides)}; "
                "choose a smaller one, or train the model itself without --lora-rank."
            )


def _check_left_over(found: list[Site], lora: Lora) -> None:
    """Say so where it is an exception or the choice of layers that leaves no module an adapter."""
    layers = sorted({int(number) for site in found for number in site.name.split(".") if number.isdecimal()})
    positions = lora.selection.positions()
    if positions is not None and layers and not positions.intersection(layers):
        raise UsageError(
            f"--lora-layers-to-transform {lora.layers} names no layer of this model, which has {layers[0]} to "
            f"{layers[-1]}; name some of those."
        )
    everything = frozenset(site.leaf for site in found)
    if lora.exclude is not None and not _targeted(found, everything, replace(lora, targets=None, layers=None)):
        raise UsageError(f"--lora-exclude-modules {lora.exclude} leaves no module an adapter; exclude fewer.")


def _is_linear(module: Module) -> bool:
    return isinstance(module, (Linear, Conv1D))


def shape_of(module: Module) -> tuple[int, int]:
    """Inputs and outputs of a linear layer or an embedding."""
    if isinstance(module, Linear):
        return module.inputs, module.outputs
    assert isinstance(module, (Conv1D, Embedding))
    inputs, outputs = module.weight.shape
    return inputs, outputs


_PARAMETERS = {"up_proj": "gate_up_proj"}


def _adapted(module: Module, lora: Lora, rank: int) -> Module:
    if isinstance(module, Embedding):
        return LoraEmbedding(module, rank, dtype=lora.dtype, dora=lora.dora)
    inputs, outputs = shape_of(module)
    return LoraLinear(
        module,
        inputs,
        outputs,
        rank,
        dtype=lora.dtype,
        dropout=lora.dropout,
        bias=lora.bias == "adapter",
        dora=lora.dora,
    )


def _train_biases(network: Module, *, only_adapted: bool) -> None:
    for _, module in network.modules():
        if isinstance(module, LoraLinear) or not only_adapted:
            holder = module.base_layer if isinstance(module, LoraLinear) else module
            for name, parameter in holder.direct_tensors():
                if name == "bias":
                    parameter.trainable = True
