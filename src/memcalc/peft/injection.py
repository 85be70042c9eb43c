"""Putting LoRA adapters into a network: which layers get one is said by `targets`."""

from __future__ import annotations

from memcalc.common.assumption import Assumption
from memcalc.errors import UsageError
from memcalc.nn.layers.linear import Embedding
from memcalc.nn.module import Module
from memcalc.nn.module_paths import Site, split_names
from memcalc.nn.stack import Stack
from memcalc.peft.experts import AdaptedWeight
from memcalc.peft.lora import LoraEmbedding, LoraLinear
from memcalc.peft.modules_to_save import save_modules
from memcalc.peft.targets import Lora, find_targets, shape_of
from memcalc.tables.lora_targets import REFUSED

_PARAMETERS = {"up_proj": "gate_up_proj"}


def add_lora(network: Module, model_type: str, lora: Lora) -> list[Assumption]:
    """Freeze everything and add adapters to the layers that `lora` targets; returns the assumptions."""
    for _, parameter in network.tensors():
        parameter.trainable = False
    targets = find_targets(network, model_type, lora)
    targets.check()
    lora, targeted = targets.lora, targets.layers
    refused = {site.leaf for site in targeted}.intersection(REFUSED.get(model_type, ()))
    if refused:
        rest = sorted({site.leaf for site in targeted} - refused)
        raise UsageError(
            f"PEFT refuses adapters on {', '.join(sorted(refused))} of {model_type}; name the others with "
            f"--lora-targets ({','.join(rest) or 'in_proj'})."
        )
    for site in targeted:
        site.replace(_adapted(site.module, lora, lora.selection.rank_of(site.name)))
    for site, wrapped in targets.mixtures:
        _adapt_mixture(site, wrapped, lora)
    if lora.bias in ("all", "lora-only"):
        _train_biases(network, only_adapted=lora.bias == "lora-only")
    unsaved: list[str] = []
    if lora.modules_to_save is not None:
        saved = save_modules(network, lora.modules_to_save)
        wanted = split_names(lora.modules_to_save)
        unsaved = sorted(name for name in wanted if not any(site.name.endswith(name) for site in saved))
    return [
        *targets.notes,
        *(
            Assumption("lora_target_missing", f"no module is called {name[:40]}: it gets no adapter (--lora-targets)")
            for name in targets.idle
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
    targets = find_targets(network, model_type, lora)
    saved = split_names(lora.modules_to_save or "")
    trained = {id(site.module) for site in targets.layers}
    trained |= {id(site.module) for site, _ in targets.mixtures}
    trained |= {id(site.module) for site in targets.everything if any(site.name.endswith(name) for name in saved)}
    for _, stack in network.modules():
        if isinstance(stack, Stack) and not stack.shared:
            adapted = (
                at for at, block in stack.positions if any(id(module) in trained for _, module in block.modules())
            )
            if first := next(adapted, 0):
                stack.split([position > first for position in range(stack.depth)])


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
