"""What an objective takes for granted, for the Assumptions."""

from __future__ import annotations

from collections.abc import Iterator

from memcalc.common.assumption import Assumption
from memcalc.setup.defaults import OF_GENERATIONS, OF_PAIRS, WITH_COMPLETIONS, WITH_REFERENCE
from memcalc.setup.setup import TrainingSetup

_BESIDE = {
    "shared": "the trained model with its adapters off",
    "copy": "a copy of the model, which autocast treats as a trained one",
    "precomputed": "none in memory, its log-probabilities were computed before",
    "none": "none, as with beta 0",
}


def notes(setup: TrainingSetup, completion: int, length: int) -> Iterator[Assumption]:
    """Lines about the objective of `setup`, whose sequences have `length` tokens and end in `completion` of them."""
    rows = setup.sequences
    name, pairs = setup.objective, setup.objective in OF_PAIRS
    logged = ", logged statistics included" if name in ("dpo", "grpo") else ""
    trainer = "experimental trainer of TRL" if name in ("ppo", "gkd", "orpo", "cpo") else "trainer of TRL"
    trainer += " 1.16" if setup.trainer_used == "trl" else " 1.12"
    what = (
        f"{setup.batch} pair{'s' * (setup.batch > 1)} (--batch), so {rows} sequences" if pairs else f"{rows} sequences"
    )
    yield Assumption(
        "objective_trainer", f"{name} as the {trainer} runs it with its default loss{logged}: {what} of {length} tokens"
    )
    if name in WITH_COMPLETIONS:
        option = "" if setup.max_completion_length is not None else " (--max-completion-length)"
        yield Assumption("completion_length", f"{completion} tokens of each sequence are its completion{option}")
    if name in WITH_REFERENCE:
        option = "" if setup.reference_model is not None else " (--reference-model)"
        yield Assumption("reference_model", f"reference model: {_BESIDE[setup.reference_used]}{option}")
    if setup.uses_fused_head:
        yield Assumption(
            "fused_head",
            "labels are scored by TRL's fused head in tiles of 4,096 tokens and 32,768 entries of the vocabulary; "
            "no logits exist",
        )
    if name == "distillation" and setup.trainer_used == "trl" and setup.precision.startswith("mixed"):
        yield Assumption(
            "distillation_without_autocast",
            "on one GPU TRL's distillation runs without autocast, whatever bf16 says: in the weights' fp32",
        )
    if pairs or name == "kto":
        yield Assumption("dropout_off", "dropout is switched off, in adapters too, as TRL does it")
    if name in ("distillation", "gkd"):
        yield Assumption(
            "teacher_dtype", "teacher in the dtype of the student's weights; completions were generated before the step"
        )
    if name == "ppo":
        yield Assumption(
            "value_model",
            "a value model like the policy is trained beside it and counts among the parameters; a reward model "
            "like it stands by; every sequence has the same positions",
        )
    if name in OF_GENERATIONS:
        yield Assumption(
            "completions_generated_before",
            "the completions were generated and rewarded before the step: --batch prompts with --num-generations "
            "each, whose product is TRL's per_device_train_batch_size; an inference engine on the same GPU is not "
            "counted",
        )
