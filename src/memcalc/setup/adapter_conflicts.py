"""What is wrong with the options of adapters, and of the weights that stay beside them."""

from __future__ import annotations

from collections.abc import Iterator

from memcalc.common.escaping import quoted
from memcalc.setup.training_options import TrainingOptions
from memcalc.tables.lora_targets import OTHER_ADAPTERS, SAME_AS_LORA

DORA_BASES = ("none", "nf4", "nf4-double", "fp4", "int8")
"""Bases whose adapters PEFT lets have a magnitude vector (peft/tuners/lora: layer.py and bnb.py)."""

LORA_OPTIONS = (
    "lora_targets",
    "lora_exclude_modules",
    "lora_layers_to_transform",
    "lora_rank_pattern",
    "lora_target_parameters",
    "lora_dtype",
    "lora_dropout",
    "lora_bias",
    "dora",
    "modules_to_save",
)
"""Options that say how LoRA trains."""


def adapter_conflicts(setup: TrainingOptions) -> Iterator[str]:
    """What is wrong with them, a sentence each."""
    yield from _frozen_dtype(setup)
    yield from _lora(setup)
    yield from _quantized(setup)
    yield from _float8(setup)


def _frozen_dtype(setup: TrainingOptions) -> Iterator[str]:
    if setup.frozen_dtype is not None and setup.lora_rank is not None:
        yield "--frozen-dtype is for parts of a model; the base of adapters has the dtype of --precision: leave it out."
    if setup.frozen_dtype is not None and not setup.precision.startswith("mixed-"):
        yield (
            f"--frozen-dtype needs autocast to bring two dtypes together, and --precision {setup.precision} has none; "
            "use --precision mixed-bf16 or mixed-fp16, or leave out --frozen-dtype."
        )
    if setup.frozen_dtype is not None and setup.parallel not in (None, "none"):
        yield "--frozen-dtype is described for one GPU; leave out --parallel, or --frozen-dtype."


def _lora(setup: TrainingOptions) -> Iterator[str]:
    lora = setup.lora_rank is not None
    kind = setup.peft_type.lower().replace("_", "-")
    if kind not in SAME_AS_LORA:
        yield (
            f"adapters of the kind {quoted(setup.peft_type)} are not computed{OTHER_ADAPTERS.get(kind, '')}; "
            f"--peft-type takes {', '.join(SAME_AS_LORA)}, with --lora-rank."
        )
    elif "peft_type" in setup.model_fields_set and not lora:
        yield f"--peft-type {setup.peft_type} says which adapters are trained, but there is no --lora-rank; give one."
    for name in LORA_OPTIONS:
        if not lora and name in setup.model_fields_set and getattr(setup, name) not in (None, False):
            yield (
                f"--{name.replace('_', '-')} says how LoRA trains, but there is no --lora-rank; "
                "give one, such as --lora-rank 16."
            )
    if not (lora or setup.prepare_kbit_training):
        yield (
            "--no-prepare-kbit-training says how LoRA on a quantized model starts, but there is no "
            "--lora-rank; leave it out."
        )
    if lora and setup.train_only != "all":
        yield (
            "--train-only chooses weights of the model itself, but with --lora-rank only adapters are trained; "
            "leave one of them out, or name whole modules with --modules-to-save."
        )


def _quantized(setup: TrainingOptions) -> Iterator[str]:
    if setup.quantize_moe_experts != "none" and setup.quantization == "none":
        yield "--quantize-moe-experts goes with --quantization, such as nf4; add it, or leave it out."
    if setup.quantization != "none" and setup.lora_rank is None:
        yield (
            f"a model quantized to {setup.quantization} cannot be trained itself, as its weights have no gradients; "
            "add adapters with --lora-rank, or leave out --quantization."
        )
    if setup.dora and setup.quantization not in DORA_BASES:
        yield (
            f"PEFT has no DoRA on {setup.quantization} weights; use --quantization nf4, nf4-double, fp4 or int8, "
            "or leave out --dora."
        )


def _float8(setup: TrainingOptions) -> Iterator[str]:
    if setup.float8_recipe == "none":
        return
    if setup.quantization != "none":
        yield (
            f"--float8-recipe multiplies weights that are wide, and --quantization {setup.quantization} packs them; "
            "leave one of them out."
        )
    if setup.tensor_parallel_size > 1:
        yield "--float8-recipe is computed without tensor parallelism; leave out --tensor-parallel-size."
