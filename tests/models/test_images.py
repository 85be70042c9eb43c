"""Images among tokens: how many tokens they take, what is taken for granted of them, and what is refused."""

from typing import Any

import pytest

from memcalc import estimate
from memcalc.errors import ConfigError, UsageError
from memcalc.inference.generate import generate
from memcalc.models.build import build
from memcalc.models.families.vision_language.llava_next import best_resolution
from memcalc.models.spec import ModelSpec
from memcalc.nn.layers.equal_pieces import Repeat
from memcalc.nn.layers.packed_vision import window_lengths
from memcalc.peak.sweep import Sweep
from memcalc.report.assumptions import assumed
from memcalc.setup.setup import InferenceSetup, TrainingSetup
from memcalc.training.step import trace
from memcalc.training.traced_step import Step

TEXT = {
    "vocab_size": 70,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
TOWER = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": 56,
    "patch_size": 14,
}
LLAVA = {"model_type": "llava", "text_config": TEXT, "vision_config": TOWER}
QWEN = {
    "model_type": "qwen2_5_vl",
    **TEXT,
    "vision_config": {
        "hidden_size": 64,
        "num_heads": 4,
        "depth": 2,
        "intermediate_size": 96,
        "out_hidden_size": 64,
        "fullatt_block_indexes": [1],
    },
}
TILES = {"model_type": "idefics3", "text_config": TEXT, "vision_config": {**TOWER, "image_size": 56}}
PIXTRAL = {
    "model_type": "llava",
    "text_config": TEXT,
    "vision_feature_select_strategy": "full",
    "vision_feature_layer": -1,
    "vision_config": {**TOWER, "model_type": "pixtral", "image_size": 512},
}
TILES_4 = {
    "model_type": "llama4",
    "text_config": TEXT,
    "vision_config": {
        **TOWER,
        "intermediate_size": 256,
        "projector_input_dim": 32,
        "projector_output_dim": 32,
        "vision_output_dim": 32,
    },
}
ARIA: dict[str, Any] = {
    "model_type": "aria",
    "text_config": {**TEXT, "moe_num_experts": 4},
    "vision_config": TOWER,
    "projector_patch_to_query_dict": {"4": 2, "16": 3},
}
GRIDS = [(336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008)]


def spec(config: dict[str, Any]) -> ModelSpec:
    return ModelSpec.from_config(config)


def train(config: dict[str, Any], **options: Any) -> Step:
    return trace(spec(config), TrainingSetup(**options))


def forward(step: Step) -> int:
    return Sweep(step.tape).peaks()[0]["forward"][0]


@pytest.mark.parametrize(
    ("config", "size", "tokens"),
    [
        (LLAVA, None, 16),
        (QWEN, None, 256),
        (QWEN, 448, 256),
        (QWEN, 461, 256),
        (QWEN, 463, 289),
        (QWEN, 1, 1),
        (TILES, None, 4),
        (TILES, 56, 4),
        (TILES, 57, 5 * 4),
        (TILES, 168, 10 * 4),
        (PIXTRAL, None, 32 * 32),
        (PIXTRAL, 449, 33 * 33),
        (PIXTRAL, 5000, 37 * 37),
        (ARIA, None, 3),
        (ARIA, 28, 2),
        (TILES_4, None, 4),
        (TILES_4, 100, 5 * 4),
        (TILES_4, 5000, 17 * 4),
    ],
)
def test_tokens_of_an_image(config: dict[str, Any], size: int | None, tokens: int) -> None:
    assert build(spec(config)).image_tokens(1, size) == tokens
    assert build(spec(config)).image_tokens(3, size) == 3 * tokens


def test_the_default_length_has_room_for_images() -> None:
    lengths = [train(LLAVA, images_per_sequence=count).seq_len for count in (0, 1, 2)]
    assert [length - lengths[0] for length in lengths] == [0, 16, 32]


def test_images_cost_memory_and_none_cost_none() -> None:
    none, one, two = (forward(train(QWEN, seq_len=600, images_per_sequence=count)) for count in (0, 1, 2))
    assert none < one < two


def test_what_was_not_said_is_said() -> None:
    setup = TrainingSetup(image_size=100)
    lines = [line.text for line in assumed(spec(QWEN), setup, trace(spec(QWEN), setup))]
    assert "an image of 112 x 112 pixels in each sequence: 16 tokens (--images-per-sequence, --image-size)" in lines
    setup = TrainingSetup(images_per_sequence=2, image_size=112)
    assert not any("pixels" in line.text for line in assumed(spec(QWEN), setup, trace(spec(QWEN), setup)))


def test_a_tower_with_places_for_patches_reads_one_size() -> None:
    train(LLAVA, image_size=56)
    with pytest.raises(UsageError, match=r"--image-size 112 does not fit this model, .* 56"):
        train(LLAVA, image_size=112)


def test_images_that_do_not_fit_into_the_sequence() -> None:
    with pytest.raises(UsageError, match=r"--images-per-sequence 2 takes 32 tokens .* give --seq-len 32 or more"):
        train(LLAVA, images_per_sequence=2, seq_len=31)


def test_images_are_read_once_and_held_until_the_last_token() -> None:
    step = generate(spec(QWEN), InferenceSetup(images_per_sequence=2))
    patch = 3 * 2 * 14 * 14
    assert [a.raw_nbytes for a in step.tape.inputs if a.name == "images"] == [2 * 1024 * patch * 2]
    peaks, _ = Sweep(step.tape).peaks()
    assert peaks["prefill"][0] > peaks["decode"][0]


@pytest.mark.parametrize(
    ("side", "grid"), [(336, (336, 672)), (500, (672, 672)), (672, (672, 672)), (2000, (672, 672))]
)
def test_the_grid_that_fits_best(side: int, grid: tuple[int, int]) -> None:
    assert best_resolution(side, GRIDS) == grid


def test_windows_at_the_edges_are_smaller() -> None:
    assert window_lengths(4, 4, 4, 1) == [Repeat([Repeat([16], 1)], 1)]
    assert window_lengths(9, 6, 4, 3) == [Repeat([Repeat([48], 1), 24], 2), Repeat([12], 1), 6]


@pytest.mark.parametrize(
    ("config", "key"),
    [
        ({**LLAVA, "vision_feature_layer": -9}, "vision_feature_layer"),
        ({**LLAVA, "vision_config": {**TOWER, "model_type": "resnet"}}, "resnet"),
        ({**TILES, "scale_factor": 3}, "scale_factor"),
        ({**LLAVA, "model_type": "llava_next", "image_grid_pinpoints": [[336]]}, "image_grid_pinpoints"),
        ({**LLAVA, "model_type": "llava_onevision", "vision_aspect_ratio": "square"}, "vision_aspect_ratio"),
        ({"model_type": "mllama", "vision_config": {"vision_output_dim": 7}}, "vision_output_dim"),
        (
            {"model_type": "mllama", "vision_config": {}, "text_config": {"cross_attention_layers": [40]}},
            "cross_attention_layers",
        ),
        ({"model_type": "llama4", "vision_config": {"projector_input_dim": 8}}, "projector_input_dim"),
        ({"model_type": "llama4", "vision_config": {"pixel_shuffle_ratio": 0.3}}, "pixel_shuffle_ratio"),
        (
            {"model_type": "kimi_k25", "text_config": {}, "vision_config": {"merge_kernel_size": [2]}},
            "merge_kernel_size",
        ),
        ({"model_type": "kimi_k25", "vision_config": {"hidden_size": 64}}, "projection_hidden_size"),
        ({**ARIA, "projector_patch_to_query_dict": {"x": 1}}, "projector_patch_to_query_dict"),
        ({**ARIA, "text_config": {**ARIA["text_config"], "moe_topk": 9}}, "moe_topk"),
        ({**QWEN, "vision_config": {"num_heads": 5}}, "heads"),
    ],
)
def test_configs_that_cannot_be(config: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        build(spec(config))


@pytest.mark.parametrize("model_type", ["blip", "clip", "siglip"])
def test_one_image_stands_beside_each_text(model_type: str) -> None:
    config = {"model_type": model_type, "text_config": {}, "vision_config": {"image_size": 32, "patch_size": 16}}
    for setup, message in (
        (InferenceSetup(seq_len=16, images_per_sequence=2), "one image beside each text"),
        (InferenceSetup(seq_len=16, image_size=48), "--image-size 48"),
    ):
        with pytest.raises(UsageError, match=message):
            generate(spec(config), setup)


def test_frozen_towers_keep_their_inputs_under_checkpointing() -> None:
    """Transformers makes patches need a gradient then, so that every block of the tower keeps its input."""
    options = {"freeze": "vision", "activation_checkpointing": "full"}
    kept = [train({**LLAVA, "vision_config": {**TOWER, "num_hidden_layers": n}}, **options) for n in (4, 5)]
    saved = [Sweep(step.tape).saved_for_backward(step.forward_end) for step in kept]
    assert saved[1] > saved[0]


def test_images_for_which_there_are_no_queries() -> None:
    with pytest.raises(UsageError, match=r"42 pixels have 9 patches.* --image-size one of 28, 56"):
        train(ARIA, image_size=42)


def test_the_merger_has_the_names_of_its_checkpoint() -> None:
    setup = TrainingSetup(seq_len=256, lora_rank=2, lora_targets="mlp.0")
    report = estimate(ModelSpec.from_config(QWEN), setup)
    assert report.model.parameters.trainable == 2 * (256 + 256)
