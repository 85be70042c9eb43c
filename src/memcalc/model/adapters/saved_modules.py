"""Modules that are trained in full beside LoRA adapters: PEFT's `modules_to_save`."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from memcalc.errors import UsageError
from memcalc.model.adapters.sites import Site, sites, split_names
from memcalc.model.module import Module, Parameter


class TrainedCopy(Module):
    """A frozen module that stays in memory unused, and the trained copy that runs in its place."""

    def __init__(self, original: Module) -> None:
        self.original_module = original
        self.trained = deepcopy(original)
        self.copies = original.copies
        for _, parameter in self.trained.parameters():
            parameter.trainable = True

    def __call__(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the copy."""
        return self.trained(x, *args, **kwargs)

    @property
    def weight(self) -> Parameter:
        """The copy's weight, for those who look at it directly."""
        weight: Parameter = self.trained.weight
        return weight


def save_modules(network: Module, names: str) -> list[Site]:
    """Replace every module whose name ends in one of `names`, separated by commas, by a trained copy beside it."""
    wanted = split_names(names)
    ending = {site.name: site for site in reversed(sites(network)) if any(site.name.endswith(name) for name in wanted)}
    found = list(reversed(ending.values()))  # of modules that go by one name the outermost
    if not found:
        leaves = ", ".join(dict.fromkeys(site.leaf for site in sites(network) if not site.leaf.isdigit()))
        raise UsageError(f"--modules-to-save {names} matches no module; the model has {leaves}.")
    for site in found:
        site.replace(TrainedCopy(site.module))
    return found
