"""Images as people give them: width and height, and the limits of pixels that processors keep."""

from typing import Any

import pytest
from support.reports import lines
from support.shapes import decoder

from memcalc import InferenceSetup, ModelSpec, TrainingSetup, estimate
from memcalc.common.image_sides import ImageSides
from memcalc.errors import UsageError

QWEN = decoder(64, 2, 4, 2, 128, 1000, model_type="qwen2_5_vl") | {
    "vision_config": {
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_heads": 4,
        "out_hidden_size": 64,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "window_size": 112,
        "fullatt_block_indexes": [1],
    }
}
PIXTRAL = {
    "model_type": "mistral3",
    "spatial_merge_size": 2,
    "text_config": decoder(64, 2, 4, 2, 128, 1000, model_type="mistral", head_dim=16, sliding_window=None),
    "vision_config": {
        "model_type": "pixtral",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "head_dim": 16,
        "image_size": 1540,
        "patch_size": 14,
    },
}


def tokens(config: dict[str, Any], **options: Any) -> int:
    """Tokens of one image, behind the 256 of text."""
    found = estimate(ModelSpec.from_config(config), TrainingSetup.model_validate({"precision": "bf16", **options}))
    return int(found.setup["seq_len"]) - 256


@pytest.mark.parametrize(
    ("options", "count"),
    [
        ({"image_width": 1260, "image_height": 700}, 45 * 25),
        ({"image_width": 700, "image_height": 1260}, 45 * 25),
        ({"image_width": 768, "image_height": 768}, 27 * 27),
        ({"image_size": 2000, "image_max_pixels": 602_112}, 27 * 27),
        ({"image_width": 1920, "image_height": 1080, "image_max_pixels": 1280 * 28 * 28}, 47 * 26),
        ({"image_width": 56, "image_height": 56, "image_min_pixels": 256 * 28 * 28}, 16 * 16),
    ],
    ids=str,
)
def test_qwen_vl(options: dict[str, int], count: int) -> None:
    """`smart_resize` of Transformers' Qwen2-VL processor: multiples of 28 pixels within the limits."""
    assert tokens(QWEN, **options) == count


def test_a_square_by_its_sides_is_the_square() -> None:
    spec = ModelSpec.from_config(QWEN)
    square, sides = TrainingSetup(image_size=448), TrainingSetup(image_width=448, image_height=448)
    assert estimate(spec, square).peak == estimate(spec, sides).peak
    wide = estimate(spec, InferenceSetup(image_width=896, image_height=224))
    assert wide.peak.allocated_bytes > 0
    assert any("896 x 224 pixels" in line and "256 tokens" in line for line in lines(wide))


def test_pixtral_shrinks_the_longer_side() -> None:
    assert tokens(PIXTRAL, image_width=3080, image_height=1540) == 55 * 28
    assert tokens(PIXTRAL, image_width=280, image_height=140) == 10 * 5


def test_limits_keep_the_shape() -> None:
    assert ImageSides(1000, 500, max_pixels=125_000).fitted(28) == (476, 224)
    assert ImageSides(10, 10).fitted(28) == (28, 28)


@pytest.mark.parametrize(
    ("config", "options", "words"),
    [
        (QWEN, {"image_width": 100}, "go together"),
        (QWEN, {"image_width": 100, "image_height": 100, "image_size": 100}, "leave one out"),
        (decoder(64, 2, 4, 2, 128, 1000), {"image_width": 100, "image_height": 100}, "any height and width"),
        (decoder(64, 2, 4, 2, 128, 1000), {"image_max_pixels": 1000}, "any height and width"),
    ],
)
def test_what_is_refused(config: dict[str, Any], options: dict[str, int], words: str) -> None:
    with pytest.raises(UsageError) as refusal:
        tokens(config, **options)
    assert words in str(refusal.value).replace('any height and "', "any height and ")
