"""Modules that are trained in full next to LoRA adapters: PEFT's `modules_to_save`."""

from __future__ import annotations

from memcalc.errors import UsageError
from memcalc.nn.module import Module, TrainedCopy
from memcalc.nn.module_paths import Site, sites, split_names
from memcalc.nn.stack import Stack


def save_modules(network: Module, names: str) -> list[Site]:
    """Replace every module whose name ends in one of `names`, separated by commas, by itself and a trained copy."""
    wanted = split_names(names)
    ending = {site.name: site for site in reversed(sites(network)) if any(site.name.endswith(name) for name in wanted)}
    found = list(reversed(ending.values()))  # of modules that go by one name the outermost
    if not found:
        leaves = ", ".join(dict.fromkeys(site.leaf for site in sites(network) if not site.leaf.isdigit()))
        raise UsageError(f"--modules-to-save {names} matches no module; the model has {leaves}.")
    if blocks := [site.name for site in found if site.leaf.isdigit() or _holds_blocks(site.module)]:
        raise UsageError(
            f"--modules-to-save {names} matches blocks as a whole ({', '.join(blocks[:3])}), of which memcalc computes "
            "no trained copies; name modules in them, such as mlp."
        )
    for site in found:
        site.replace(TrainedCopy(site.module))
    return found


def _holds_blocks(module: Module) -> bool:
    return isinstance(module, Stack) or any(_holds_blocks(child) for _, child in module.children())
