"""What is wrong with the options of the loss: its implementation, the objective, and the trainer that computes it."""

from __future__ import annotations

from collections.abc import Iterator

from memcalc.errors import option_name
from memcalc.setup.defaults import FUSED_HEAD, IN_PLAIN_LOOPS, OF_GENERATIONS, WITH_COMPLETIONS, WITH_REFERENCE
from memcalc.setup.training_options import TrainingOptions


def loss_conflicts(setup: TrainingOptions) -> Iterator[str]:
    """What is wrong with them, a sentence each."""
    yield from _loss(setup)
    yield from _objective(setup)
    yield from _trainer(setup)


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
