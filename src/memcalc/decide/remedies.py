"""What makes a training job smaller: one row a remedy, those that cost least first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from memcalc.errors import UsageError, option_name
from memcalc.setup.setup import TrainingSetup


@dataclass(frozen=True)
class Remedy:
    """A change of options, and what one pays for it.

    `only_from` are the values from which it is a step forward; fields that are not named may have any.
    """

    name: str
    cost: str
    options: Mapping[str, Any]
    only_from: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    keys: str = ""
    """The same in the keys of the framework whose file was read; empty where there was none."""

    def applied(self, setup: TrainingSetup) -> TrainingSetup | None:
        """`setup` with the remedy; None where it has it already, or cannot have it."""
        if any(getattr(setup, name) not in values for name, values in self.only_from.items()):
            return None
        if all(getattr(setup, name) == value for name, value in self.options.items()):
            return None
        try:
            return setup.model_copy(update=self.options)
        except UsageError:
            return None

    def as_options(self) -> str:
        """The remedy as options of the command line, or in the framework's keys."""
        return self.keys or " ".join(_option(name, value) for name, value in self.options.items() if value is not None)


def _option(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return option_name(name) if value else f"--no-{option_name(name)[2:]}"
    return f"{option_name(name)} {value}"


_ADAMW = ("adamw",)
_UNQUANTIZED = ("none",)

REMEDIES: tuple[Remedy, ...] = (
    Remedy(
        "fused optimizer",
        "nothing: the step needs no copies",
        {"optimizer_impl": "fused"},
        {"optimizer": _ADAMW, "optimizer_impl": (None, "foreach", "for-loop")},
    ),
    Remedy(
        "fused loss",
        "Liger's kernel in place of the logits; the same loss",
        {"loss_implementation": "liger"},
        {"objective": ("sft",), "loss_implementation": ("eager",)},
    ),
    Remedy(
        "activation checkpointing",
        "a third more compute: each block runs forward twice",
        {"activation_checkpointing": "full"},
        {"activation_checkpointing": ("none", "selective")},
    ),
    Remedy(
        "8-bit optimizer",
        "states in 8 bits (bitsandbytes)",
        {"optimizer": "adamw-8bit", "optimizer_impl": None},
        {"optimizer": _ADAMW},
    ),
    Remedy(
        "weights in 16 bits",
        "updates are rounded to bf16",
        {"precision": "bf16"},
        {"precision": ("fp32", "mixed-bf16", "mixed-fp16")},
    ),
    Remedy(
        "LoRA",
        "adapters of rank 16 are trained, not the model",
        {"lora_rank": 16, "lora_targets": "all-linear", "precision": "bf16"},
        {"lora_rank": (None,), "train_only": ("all",), "quantization": _UNQUANTIZED},
    ),
    Remedy(
        "QLoRA",
        "the frozen weights in 4 bits: some quality, more time",
        {"lora_rank": 16, "lora_targets": "all-linear", "precision": "bf16", "quantization": "nf4-double"},
        {"train_only": ("all",), "quantization": _UNQUANTIZED},
    ),
    Remedy(
        "activation offloading",
        "activations in host memory, and the transfers",
        {"activation_offloading": True},
        {"activation_offloading": (False,)},
    ),
)
"""Remedies in the order of what they cost."""

_REPLICATED = (None, "ddp")
_DEEPSPEED = ("zero1", "zero2", "zero3")

SHARDING: tuple[Remedy, ...] = (
    Remedy(
        "ZeRO 1",
        "optimizer states shared by the ranks, updated weights gathered",
        {"parallel": "zero1"},
        {"parallel": _REPLICATED},
    ),
    Remedy(
        "FSDP2",
        "all shared by the ranks; each block's weights gathered twice a step",
        {"parallel": "fsdp2"},
        {"parallel": (*_REPLICATED, "zero1")},
    ),
    Remedy(
        "ZeRO 3",
        "all shared by the ranks; each module's weights gathered twice a step",
        {"parallel": "zero3"},
        {"parallel": ("zero1", "zero2")},
    ),
)
"""What ranks that hold the same can share, in the order of what it sends."""

OFFLOADING: tuple[Remedy, ...] = (
    Remedy(
        "optimizer offloading",
        "states and the step in host memory",
        {"cpu_offload": "optimizer"},
        {"parallel": _DEEPSPEED, "cpu_offload": (None,)},
    ),
    Remedy(
        "parameter offloading",
        "weights and states in host memory, and the transfers",
        {"cpu_offload": "parameters"},
        {"parallel": ("fsdp2",), "cpu_offload": (None,)},
    ),
    Remedy(
        "parameter offloading",
        "weights and states in host memory, and the transfers",
        {"cpu_offload": "optimizer,parameters"},
        {"parallel": ("zero3",), "cpu_offload": (None, "optimizer")},
    ),
)
"""What sharded ranks can keep on their hosts."""

ACCUMULATION_COST = "the same batch in more, smaller micro-batches"


def remedies(setup: TrainingSetup) -> Iterator[Remedy]:
    """The remedies for `setup`, those that cost least first.

    Accumulation comes where the micro-batch is above one, sharding where there are several ranks.
    """
    several = (setup.gpus or setup.data_parallel_size or 1) > 1
    for remedy in REMEDIES:
        if remedy.name == "activation checkpointing":
            if setup.batch > 1:
                steps = setup.grad_accum * setup.batch
                yield Remedy("gradient accumulation", ACCUMULATION_COST, {"batch": 1, "grad_accum": steps})
            if several:
                yield from SHARDING
        yield _with_own_rank(remedy, setup)
    if several:
        yield from OFFLOADING


def _with_own_rank(remedy: Remedy, setup: TrainingSetup) -> Remedy:
    """A setup with adapters keeps them: its rank and its targets stand."""
    if remedy.name != "QLoRA" or setup.lora_rank is None:
        return remedy
    return Remedy(remedy.name, remedy.cost, {"quantization": "nf4-double"}, remedy.only_from)
