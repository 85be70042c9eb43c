"""Which modules of a model a LoraConfig means: by name, by pattern, and as parts of fused experts.

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
from memcalc.peft.selection import Selection, is_pattern
from memcalc.tables.dtypes import FP32, DType
from memcalc.tables.lora_targets import FUSED_PROJECTIONS, MIXTURES, OWN_NAMES, PARTS, default_targets


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


@dataclass(frozen=True)
class Targets:
    """What of a model gets an adapter."""

    lora: Lora
    """The options, with targets by the names that modules have here."""
    everything: list[Site]
    """All modules of the model."""
    layers: list[Site]
    """Linear layers and embeddings that get an adapter."""
    mixtures: list[tuple[Site, list[str]]]
    """Experts and routers of which parameters get an adapter, with the attributes that hold those."""
    idle: list[str]
    """Names that no module has."""
    notes: list[Assumption]

    def check(self) -> None:
        """Raise UsageError for targets that match no layer, and for a rank that no targeted matrix has."""
        _check_matched(self.everything, self.layers, self.mixtures, self.lora)


def find_targets(network: Module, model_type: str, lora: Lora) -> Targets:
    """What the options mean in this model. Raises UsageError for parts of experts that PEFT refuses."""
    found = sites(network)
    lora, notes = _by_names_here(lora, model_type)
    names, fused = _in_mixtures(_names(found, model_type, lora), model_type)
    listed = frozenset[str]() if is_pattern(lora.targets or "") else split_names(lora.targets or "")
    idle = sorted(name for name in listed & names if not any(matches(site.name, frozenset((name,))) for site in found))
    layers, mixtures = _targeted(found, names, lora), _mixtures(found, fused | _parameters(lora))
    return Targets(lora, found, layers, mixtures, idle, notes)


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
