"""Options that exclude each other, each told in one sentence: what, why, and what to do next."""

from __future__ import annotations

from collections.abc import Iterator

from memcalc.errors import option_name
from memcalc.setup.adapter_conflicts import adapter_conflicts
from memcalc.setup.defaults import DEFAULT_SEQ_LEN
from memcalc.setup.lengths import parse_lengths
from memcalc.setup.loss_conflicts import loss_conflicts
from memcalc.setup.training_options import TrainingOptions
from memcalc.tables.optimizers import OPTIMIZERS, spelled

GRADIENT_PROJECTING = ("galore-adamw", "galore-adamw-8bit", "apollo-adamw")
"""Optimizers that project gradients (`tables/optimizers.py`)."""


def conflicts(setup: TrainingOptions) -> Iterator[str]:
    """What is wrong with the options of a training job, each by itself being fine.

    Raises UsageError where the optimizer is unknown.
    """
    yield from _optimizer(setup)
    yield from adapter_conflicts(setup)
    yield from _checkpointing(setup)
    yield from loss_conflicts(setup)
    yield from _lengths(setup)
    yield from _denoisers(setup)
    if setup.liger_kernels != "all" and setup.kernels != "liger":
        yield "--liger-kernels says which kernels --kernels liger puts in; add --kernels liger, or leave it out."


def _denoisers(setup: TrainingOptions) -> Iterator[str]:
    """What diffusers' scripts do not do at once."""
    alone = {"controlnet": "a ControlNet alone and in full", "textual_inversion": "the embedding of new words alone"}
    for name, what in alone.items():
        if not getattr(setup, name):
            continue
        option = f"--{name.replace('_', '-')}"
        for other in ("lora_rank", "train_text_encoder", "use_ema", *(key for key in alone if key > name)):
            if getattr(setup, other):
                yield (
                    f"{option} trains {what}, which --{other.replace('_', '-')} does not go with; leave out one of "
                    "them."
                )
        if setup.quantization != "none":
            yield f"{option} keeps the frozen UNet in 16 bits, as diffusers' scripts do; leave out --quantization."


def _optimizer(setup: TrainingOptions) -> Iterator[str]:
    name = spelled(setup.optimizer)
    row = OPTIMIZERS[name.row]
    implementations = tuple(row.step)
    if setup.optimizer_impl is not None and setup.optimizer_impl not in implementations:
        yield (
            f"{setup.optimizer} has no {setup.optimizer_impl} implementation; use --optimizer-impl "
            f"{' or '.join(implementations)}, or leave it out."
        )
    if "galore_rank" in setup.model_fields_set and row.name not in GRADIENT_PROJECTING:
        yield (
            f"--galore-rank belongs to optimizers that project gradients, but --optimizer is {setup.optimizer}; "
            f"leave it out, or use {' or '.join(GRADIENT_PROJECTING)}."
        )
    if (setup.optimizer_in_backward or name.in_backward or row.in_backward) and setup.grad_accum > 1:
        what = "--optimizer-in-backward" if setup.optimizer_in_backward else f"--optimizer {setup.optimizer}"
        yield f"{what} frees each gradient at once, so --grad-accum has nothing to add to; use one of them."


def _checkpointing(setup: TrainingOptions) -> Iterator[str]:
    if setup.checkpoint_every_n_blocks > 1 and setup.activation_checkpointing != "full":
        yield (
            "--checkpoint-every-n-blocks chooses blocks to checkpoint, but no block is; add "
            "--activation-checkpointing full."
        )
    if setup.checkpoint_reentrant and setup.activation_checkpointing == "none":
        yield "--checkpoint-reentrant says how to checkpoint, but nothing is; add --activation-checkpointing full."


def _lengths(setup: TrainingOptions) -> Iterator[str]:
    if setup.lengths is None:
        for name in ("max_steps", "seed"):
            if name in setup.model_fields_set:
                yield f"{option_name(name)} belongs to --lengths, how long batches are; add it, or leave it out."
    else:
        parse_lengths(setup.lengths)
        if setup.seq_len is not None:
            yield "--lengths and --seq-len both say how long sequences are; leave one out."
        if setup.packing:
            yield "--packing fills every row to the same length, so --lengths has nothing to say; leave one out."
        if setup.allocator_reserve is not None:
            yield "--lengths simulates what the allocator reserves, which --allocator-reserve says; leave one out."
    if setup.packing and setup.padding_mask:
        yield "--packing fills rows, and --padding-mask pads them; leave one of them out."
    if setup.packing and setup.objective != "sft":
        yield f"--packing belongs to --objective sft: trainers do not pack for {setup.objective}; leave it out."
    length = setup.seq_len or DEFAULT_SEQ_LEN
    for name in ("max_completion_length", "logits_to_keep"):
        value = getattr(setup, name)
        if value is not None and value > length:
            yield (
                f"--{name.replace('_', '-')} {value} exceeds the sequence length of {length}; "
                "lower it, or raise --seq-len."
            )
