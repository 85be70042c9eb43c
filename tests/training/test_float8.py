"""torchao's float8 training: what it cannot be beside; its memory is held by `measured/float8.jsonl`."""

import pytest
from support.shapes import decoder

from memcalc import ModelSpec, TrainingSetup, estimate
from memcalc.errors import UsageError

SMALL = ModelSpec.from_config(decoder(256, 2, 4, 2, 640, 1000))


def test_a_gpu_without_float8_is_refused() -> None:
    setup = TrainingSetup(float8_recipe="tensorwise")
    with pytest.raises(UsageError, match="A100-80GB does not multiply matrices in float8"):
        estimate(SMALL, setup, "A100-80GB")
    assert "float8_training" in {line.code for line in estimate(SMALL, setup, "H100-80GB").assumptions}


def test_weights_have_to_be_wide() -> None:
    with pytest.raises(UsageError, match="nf4 packs them"):
        TrainingSetup(float8_recipe="tensorwise", quantization="nf4", lora_rank=8)


def test_inputs_are_offloaded() -> None:
    setup = TrainingSetup(float8_recipe="tensorwise", seq_len=4096)
    offloaded = estimate(SMALL, setup.model_copy(update={"activation_offloading": True}))
    assert offloaded.peak.allocated_bytes < estimate(SMALL, setup).peak.allocated_bytes


def test_sides_are_multiples_of_16() -> None:
    """cuBLASLt takes no others: layers that have them stay wide, and a model without any is refused."""
    with pytest.raises(UsageError, match="none whose sides are multiples of 16"):
        estimate(ModelSpec.from_config(decoder(200, 2, 5, 5, 600, 1000)), TrainingSetup(float8_recipe="tensorwise"))
