"""Options that contradict each other, each told in one sentence: what, why, and what to do next."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from memcalc.tables.optimizers import optimizer

if TYPE_CHECKING:
    from memcalc.setup.setup import TrainingSetup

DEFAULT_SEQ_LEN = 256
"""Tokens per sequence when the user names none (the example of the documentation page)."""

DORA_BASES = ("none", "nf4", "nf4-double", "fp4", "int8")
"""Bases whose adapters PEFT lets have a magnitude vector (peft/tuners/lora: layer.py and bnb.py)."""

_OF_LORA = ("lora_targets", "lora_dtype", "lora_dropout", "lora_bias", "dora", "modules_to_save")

_PROJECTING = ("galore-adamw",)
"""Optimizers that project gradients (`tables/optimizers.py`)."""

REFERRING = ("dpo", "kto", "grpo", "rloo", "ppo")
"""Objectives that compare the trained model with a reference."""

_HAS_COMPLETIONS = ("sft", "dpo", "kto", "grpo", "rloo", "ppo", "distillation", "gkd", "orpo", "cpo")


def contradictions(setup: TrainingSetup) -> Iterator[str]:
    """What is wrong with the options of a training job, each by itself being fine.

    Raises UsageError where the optimizer is unknown.
    """
    yield from _optimizer(setup)
    yield from _adapters(setup)
    yield from _checkpointing(setup)
    yield from _loss(setup)
    yield from _objective(setup)
    yield from _lengths(setup)


def _optimizer(setup: TrainingSetup) -> Iterator[str]:
    row = optimizer(setup.optimizer)
    implementations = tuple(row.step)
    if setup.optimizer_impl is not None and setup.optimizer_impl not in implementations:
        yield (
            f"{setup.optimizer} has no {setup.optimizer_impl} implementation; use --optimizer-impl "
            f"{' or '.join(implementations)}, or leave it out."
        )
    if "galore_rank" in setup.model_fields_set and row.name not in _PROJECTING:
        yield (
            f"--galore-rank belongs to the galore optimizers, but --optimizer is {setup.optimizer}; "
            f"leave it out, or use {' or '.join(_PROJECTING)}."
        )
    if (setup.optimizer_in_backward or row.in_backward) and setup.grad_accum > 1:
        what = "--optimizer-in-backward" if setup.optimizer_in_backward else f"--optimizer {row.name}"
        yield f"{what} frees each gradient at once, so --grad-accum has nothing to add to; use one of them."


def _adapters(setup: TrainingSetup) -> Iterator[str]:
    lora = setup.lora_rank is not None
    for name in _OF_LORA:
        if not lora and name in setup.model_fields_set and getattr(setup, name) not in (None, False):
            yield (
                f"--{name.replace('_', '-')} says how LoRA trains, but there is no --lora-rank; "
                "give one, such as --lora-rank 16."
            )
    if not (lora or setup.kbit_prepare):
        yield "--no-kbit-prepare says how LoRA on a quantized model starts, but there is no --lora-rank; leave it out."
    if lora and setup.train != "all":
        yield (
            "--train chooses weights of the model itself, but with --lora-rank only adapters are trained; "
            "leave one of them out, or name whole modules with --modules-to-save."
        )
    if setup.quantization != "none" and not lora:
        yield (
            f"a model quantized to {setup.quantization} cannot be trained itself, as its weights have no gradients; "
            "add adapters with --lora-rank, or leave out --quantization."
        )
    if setup.dora and setup.quantization not in DORA_BASES:
        yield (
            f"PEFT has no DoRA on {setup.quantization} weights; use --quantization nf4, nf4-double, fp4 or int8, "
            "or leave out --dora."
        )


def _checkpointing(setup: TrainingSetup) -> Iterator[str]:
    if setup.checkpoint_every > 1 and setup.activation_checkpointing != "full":
        yield ("--checkpoint-every chooses blocks to checkpoint, but no block is; add --activation-checkpointing full.")
    if setup.checkpoint_reentrant and setup.activation_checkpointing == "none":
        yield "--checkpoint-reentrant says how to checkpoint, but nothing is; add --activation-checkpointing full."


def _loss(setup: TrainingSetup) -> Iterator[str]:
    if "loss_chunks" in setup.model_fields_set and setup.loss != "chunked":
        yield f"--loss-chunks counts the chunks of --loss chunked, but --loss is {setup.loss}; leave it out."
    for name, asked in (("label-smoothing", setup.label_smoothing > 0), ("z-loss", setup.z_loss)):
        if asked and setup.loss in ("chunked", "cut"):
            yield f"--loss {setup.loss} has no --{name}; use --loss eager or fused-linear, or leave --{name} out."
    if setup.loss == "eager" and setup.label_smoothing and setup.z_loss:
        yield (
            "--label-smoothing replaces the loss of the model, and --z-loss adds to it; leave one of them out, "
            "or use --loss fused-linear, which has both."
        )
    if setup.loss == "cut" and setup.precision == "fp32":
        yield "--loss cut works in 16 bits only, but --precision is fp32; use bf16, mixed-bf16 or --loss fused-linear."


def _objective(setup: TrainingSetup) -> Iterator[str]:
    if setup.reference is not None and setup.objective not in REFERRING:
        yield (
            f"--reference names the reference model of dpo, grpo and ppo, but --objective is {setup.objective}; "
            "leave it out."
        )
    if setup.reference == "none" and setup.objective == "dpo":
        yield "--objective dpo compares with a reference model; use --reference copy, shared or precomputed."
    if setup.hold_outputs and setup.objective != "sft":
        yield (
            f"--hold-outputs is about a loop of one's own around sft, but --objective {setup.objective} is computed "
            "as TRL's trainer runs it; leave it out."
        )
    if setup.completion_len is not None and setup.objective not in _HAS_COMPLETIONS:
        yield (
            f"--completion-len counts tokens of completions, but --objective {setup.objective} learns from all tokens "
            "alike; leave it out."
        )
    if setup.reference == "shared" and setup.lora_rank is None:
        yield (
            "--reference shared gets the reference by switching adapters off, but there are none; "
            "add --lora-rank, or use --reference copy."
        )
    if setup.generations > 1 and setup.objective not in ("grpo", "rloo", "ppo"):
        yield (
            f"--generations counts completions per prompt of grpo and ppo, but --objective is {setup.objective}; "
            "leave it out."
        )
    if setup.objective in _HAS_COMPLETIONS and setup.seq_len == 1:
        yield (
            f"--objective {setup.objective} learns from completions, and a sequence of one token has none; "
            "raise --seq-len."
        )
    shaped = setup.loss != "eager" or setup.label_smoothing or setup.z_loss or setup.logits_to_keep is not None
    if shaped and setup.objective != "sft":
        yield (
            "--loss, --logits-to-keep, --label-smoothing and --z-loss shape the loss of --objective sft, but it is "
            f"{setup.objective}; leave them out."
        )


def _lengths(setup: TrainingSetup) -> Iterator[str]:
    length = setup.seq_len or DEFAULT_SEQ_LEN
    for name in ("completion_len", "logits_to_keep"):
        value = getattr(setup, name)
        if value is not None and value > length:
            yield (
                f"--{name.replace('_', '-')} {value} exceeds the sequence length of {length}; "
                "lower it, or raise --seq-len."
            )
