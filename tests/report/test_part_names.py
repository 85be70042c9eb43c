"""Parts of the box have names that say what they are."""

import pytest
from support.shapes import decoder

from memcalc import ModelSpec, TrainingSetup, estimate

GUESSWORK = {"model", "module", "other", "step", "forward", ""}


@pytest.mark.parametrize("objective", ["sft", "dpo", "reward", "grpo", "ppo"])
@pytest.mark.parametrize("precision", ["mixed-fp16", "bf16"])
def test_no_part_has_to_be_guessed(objective: str, precision: str) -> None:
    spec = ModelSpec.from_config(decoder(256, 2, 4, 4, 512, 32000))
    setup = TrainingSetup.model_validate({"objective": objective, "precision": precision, "batch": 4, "seq_len": 64})
    components = estimate(spec, setup).components
    names = {part.name for _, row in components.rows() for part in row.parts}
    assert not names & GUESSWORK


def test_logits_of_a_trainer_are_called_so() -> None:
    """Under fp16 autocast the logits come back in fp32: the largest tensors of preference training."""
    spec = ModelSpec.from_config(decoder(64, 2, 4, 4, 128, 32000))
    found = estimate(spec, TrainingSetup(objective="ppo", precision="mixed-fp16", batch=4, seq_len=256))
    names = {part.name for _, row in found.components.rows() for part in row.parts}
    assert "logits in fp32" in names
