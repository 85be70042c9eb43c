"""Options that exclude each other, each told in one sentence: what, why, and what to do next."""

from __future__ import annotations

from collections.abc import Iterator

from memcalc.common.escaping import quoted
from memcalc.errors import option_name
from memcalc.setup.defaults import (
    DEFAULT_SEQ_LEN,
    FUSED_HEAD,
    IN_PLAIN_LOOPS,
    OF_GENERATIONS,
    WITH_COMPLETIONS,
    WITH_REFERENCE,
)
from memcalc.setup.lengths import parse_lengths
from memcalc.setup.training_options import TrainingOptions
from memcalc.tables.lora_targets import OTHER_ADAPTERS, SAME_AS_LORA
from memcalc.tables.optimizers import OPTIMIZERS, spelled

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

GRADIENT_PROJECTING = ("galore-adamw", "galore-adamw-8bit", "apollo-adamw")
"""Optimizers that project gradients (`tables/optimizers.py`)."""


def conflicts(setup: TrainingOptions) -> Iterator[str]:
    """What is wrong with the options of a training job, each by itself being fine.

    Raises UsageError where the optimizer is unknown.
    """
    yield from _optimizer(setup)
    yield from _adapters(setup)
    yield from _float8(setup)
    yield from _checkpointing(setup)
    yield from _loss(setup)
    yield from _objective(setup)
    yield from _trainer(setup)
    yield from _lengths(setup)
    yield from _denoisers(setup)


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


def _adapters(setup: TrainingOptions) -> Iterator[str]:
    if setup.frozen_dtype is not None and setup.lora_rank is not None:
        yield "--frozen-dtype is for parts of a model; the base of adapters has the dtype of --precision: leave it out."
    if setup.frozen_dtype is not None and not setup.precision.startswith("mixed-"):
        yield (
            f"--frozen-dtype needs autocast to bring two dtypes together, and --precision {setup.precision} has none; "
            "use --precision mixed-bf16 or mixed-fp16, or leave out --frozen-dtype."
        )
    if setup.frozen_dtype is not None and setup.parallel not in (None, "none"):
        yield "--frozen-dtype is described for one GPU; leave out --parallel, or --frozen-dtype."
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
    if setup.quantize_moe_experts != "none" and setup.quantization == "none":
        yield "--quantize-moe-experts goes with --quantization, such as nf4; add it, or leave it out."
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


def _checkpointing(setup: TrainingOptions) -> Iterator[str]:
    if setup.checkpoint_every_n_blocks > 1 and setup.activation_checkpointing != "full":
        yield (
            "--checkpoint-every-n-blocks chooses blocks to checkpoint, but no block is; add "
            "--activation-checkpointing full."
        )
    if setup.checkpoint_reentrant and setup.activation_checkpointing == "none":
        yield "--checkpoint-reentrant says how to checkpoint, but nothing is; add --activation-checkpointing full."


def _loss(setup: TrainingOptions) -> Iterator[str]:
    if "loss_num_chunks" in setup.model_fields_set and setup.loss_implementation != "chunked":
        yield (
            "--loss-num-chunks counts the chunks of --loss-implementation chunked, but it is "
            f"{setup.loss_implementation}; leave it out."
        )
    for name, asked in (("label-smoothing", setup.label_smoothing > 0), ("z-loss", setup.z_loss)):
        if asked and setup.loss_implementation in ("chunked", "cut-cross-entropy", "liger-cross-entropy"):
            yield (
                f"--loss-implementation {setup.loss_implementation} has no --{name}; use --loss-implementation "
                f"eager or liger, or leave --{name} out."
            )
    if setup.loss_implementation == "eager" and setup.label_smoothing and setup.z_loss:
        yield (
            "--label-smoothing replaces the loss of the model, and --z-loss adds to it; leave one of them out, "
            "or use --loss-implementation liger, which has both."
        )
    if setup.loss_implementation == "cut-cross-entropy" and setup.precision == "fp32":
        yield (
            "--loss-implementation cut-cross-entropy works in 16 bits only, but --precision is fp32; use "
            "bf16, mixed-bf16 or --loss-implementation liger."
        )


def _objective(setup: TrainingOptions) -> Iterator[str]:
    if setup.reference_model is not None and setup.objective not in WITH_REFERENCE:
        yield (
            "--reference-model names the reference model of dpo, kto, grpo, rloo and ppo, but --objective is "
            f"{setup.objective}; leave it out."
        )
    if setup.reference_model == "none" and setup.objective in ("dpo", "kto"):
        yield (
            f"--objective {setup.objective} compares with a reference model; use --reference-model copy, shared or "
            "precomputed."
        )
    if setup.keep_logits and setup.objective != "sft":
        yield (
            f"--keep-logits is about a loop of one's own around sft, but --objective {setup.objective} is computed "
            "as TRL's trainer runs it; leave it out."
        )
    if setup.max_completion_length is not None and setup.objective not in ("sft", *WITH_COMPLETIONS):
        yield (
            f"--max-completion-length counts tokens of completions, but --objective {setup.objective} learns "
            "from all tokens "
            "alike; leave it out."
        )
    if setup.reference_model == "shared" and setup.lora_rank is None:
        yield (
            "--reference-model shared gets the reference by switching adapters off, but there are none; "
            "add --lora-rank, or use --reference-model copy."
        )
    if setup.num_generations > 1 and setup.objective not in OF_GENERATIONS:
        yield (
            "--num-generations counts completions per prompt of grpo, rloo and ppo, but --objective is "
            f"{setup.objective}; leave it out."
        )
    if setup.objective in WITH_COMPLETIONS and setup.seq_len == 1:
        yield (
            f"--objective {setup.objective} learns from completions, and a sequence of one token has none; "
            "raise --seq-len."
        )
    shaping = {
        "loss_implementation": setup.loss_implementation != "eager",
        "logits_to_keep": setup.logits_to_keep is not None,
        "label_smoothing": bool(setup.label_smoothing),
        "z_loss": setup.z_loss,
    }
    for name, given in shaping.items():
        if given and setup.objective != "sft":
            yield (
                f"{option_name(name)} shapes the loss of --objective sft, but --objective is {setup.objective}; leave "
                f"{option_name(name)} out."
            )


def _trainer(setup: TrainingOptions) -> Iterator[str]:
    objective, trainer = setup.objective, setup.trainer_used
    if trainer == "trl" and objective == "ppo":
        yield "PPO is gone from TRL 1.16; use --trainer plain, which computes it as the trainer of TRL 1.12 ran it."
    if trainer == "plain" and objective not in IN_PLAIN_LOOPS:
        yield f"--objective {objective} is computed as TRL's trainer runs it; leave --trainer out, or use trl."
    if trainer == "hf" and objective != "sft":
        yield f"--objective {objective} has a trainer of TRL; use --trainer trl, or leave --trainer out."
    if setup.autocast is not None and setup.precision not in ("bf16", "fp16"):
        yield (
            f"--autocast runs 16-bit weights under autocast, but --precision {setup.precision} has fp32 weights; use "
            "--precision bf16, or mixed-bf16 alone, which is autocast over fp32 weights."
        )
    if setup.uses_fused_head:
        yield from _fused_head(setup)
    elif setup.max_completion_length is not None and objective == "sft":
        yield (
            "--max-completion-length changes nothing where all logits are computed; use --trainer trl or "
            "--loss-implementation tiled, whose fused head scores the completion alone, or leave it out."
        )


def _fused_head(setup: TrainingOptions) -> Iterator[str]:
    """What cannot be beside TRL's fused head."""
    if setup.loss_implementation not in ("eager", "tiled"):
        yield (
            f"--trainer trl scores labels with its own fused head, not with --loss-implementation "
            f"{setup.loss_implementation}; leave it out, or use --trainer hf."
        )
    if setup.objective not in ("sft", *FUSED_HEAD):
        yield f"--loss-implementation tiled is TRL's loss of sft, but --objective is {setup.objective}; leave it out."
    for name, asked in (
        ("keep-logits", setup.keep_logits),
        ("logits-to-keep", setup.logits_to_keep is not None),
        ("z-loss", setup.z_loss),
        ("label-smoothing", bool(setup.label_smoothing) and setup.trainer_used != "trl"),
    ):
        if asked:
            yield f"--{name} needs full logits, which TRL's fused head never makes; leave it out, or use --trainer hf."


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
