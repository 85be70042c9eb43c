"""What an objective takes for granted, for the Assumptions."""

from __future__ import annotations

from collections.abc import Iterator

from memcalc.common.assumption import Assumption
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
    name, pairs = setup.objective, setup.objective in ("dpo", "reward")
    logged = ", logged statistics included" if name in ("dpo", "grpo") else ""
    trainer = "experimental trainer of TRL" if name == "ppo" else "trainer of TRL 1.12"
    what = (
        f"{setup.batch} pair{'s' * (setup.batch > 1)} (--batch), so {rows} sequences" if pairs else f"{rows} sequences"
    )
    yield Assumption(
        "objective_trainer", f"{name} as the {trainer} runs it with its default loss{logged}: {what} of {length} tokens"
    )
    if name != "reward":
        said = "" if setup.max_completion_length is not None else " (--max-completion-length)"
        yield Assumption("completion_length", f"{completion} tokens of each sequence are its completion{said}")
    if name in ("dpo", "grpo", "ppo"):
        said = "" if setup.reference_model is not None else " (--reference-model)"
        yield Assumption("reference_model", f"reference model: {_BESIDE[setup.reference_used]}{said}")
    if pairs:
        yield Assumption("dropout_off", "dropout is switched off, in adapters too, as TRL does it")
    if name == "distillation":
        yield Assumption(
            "teacher_dtype", "teacher in the dtype of the student's weights; completions were generated before the step"
        )
    if name == "ppo":
        yield (
            Assumption(
                "value_model",
                "a value model like the policy is trained beside it and counts among the parameters; a "
                "reward model like "
                "it stands by; every sequence has the same positions",
            )
        )
    if name in ("grpo", "ppo"):
        yield (
            Assumption(
                "completions_generated_before",
                "the completions were generated and rewarded before the step: --batch prompts with "
                "--num-generations each, "
                "whose product is TRL's per_device_train_batch_size; an inference engine on the same GPU is "
                "not counted",
            )
        )
