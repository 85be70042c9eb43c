"""Videos of vision-language models: their frames, or pairs of them, are read as images are."""

from typing import Any

import pytest

from memcalc import InferenceSetup, ModelSpec, TrainingSetup, UsageError, estimate

TEXT = {
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 512,
    "vocab_size": 1000,
}
TOWER = {
    "depth": 4,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_heads": 4,
    "patch_size": 16,
    "out_hidden_size": 256,
    "deepstack_visual_indexes": [1],
    "num_position_embeddings": 256,
}
QWEN3_VL = {"model_type": "qwen3_vl", "text_config": TEXT, "vision_config": TOWER}
INTERNVL = {
    "model_type": "internvl",
    "text_config": {"model_type": "qwen2", **TEXT},
    "vision_config": {"num_hidden_layers": 1},
}


def saved(config: dict[str, Any], **options: Any) -> int:
    report = estimate(ModelSpec.from_config(config), TrainingSetup(precision="bf16", **options))
    assert report.saved_for_backward_bytes is not None
    return report.saved_for_backward_bytes


def test_seven_frames_are_four_images() -> None:
    """Saved tensors of a real run on the CPU, of the video and of four images alike: 12,664,044 bytes."""
    video = saved(QWEN3_VL, num_frames=7, image_size=128, seq_len=96)
    assert video == saved(QWEN3_VL, images_per_sequence=4, image_size=128, seq_len=96)
    assert video == pytest.approx(12_664_044, rel=0.001)


def test_limits_of_pixels_are_those_of_all_frames() -> None:
    limited = saved(QWEN3_VL, num_frames=8, image_size=256, image_max_pixels=8 * 128 * 128, seq_len=96)
    assert limited == saved(QWEN3_VL, images_per_sequence=4, image_size=128, seq_len=96)


def test_frames_of_internvl_are_images_and_the_setup_says_both() -> None:
    assert saved(INTERNVL, num_frames=3) == saved(INTERNVL, images_per_sequence=3)
    for setup in (TrainingSetup(num_frames=3), InferenceSetup(num_frames=3)):
        report = estimate(ModelSpec.from_config(INTERNVL), setup)
        assert report.setup["num_frames"] == 3
        assert any("3 frames, read as 3 images" in line.text for line in report.assumptions)


LLAVA = {"model_type": "llava", "text_config": {"num_hidden_layers": 1}, "vision_config": {"num_hidden_layers": 1}}
VIT = {"model_type": "vit", "num_hidden_layers": 1}


@pytest.mark.parametrize(("config", "words"), [(LLAVA, "how this model reads a video"), (VIT, "leave it out")])
def test_models_that_read_no_frames(config: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        estimate(ModelSpec.from_config(config), TrainingSetup(num_frames=16))
