"""Loops over images and windows: a few are run, and the answer is that of running them all."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from memcalc import InferenceSetup, ModelSpec, TrainingSetup, estimate
from memcalc.models.families.vision_language import llava_next
from memcalc.nn.layers import equal_pieces
from memcalc.nn.layers.equal_pieces import Lengths, Repeat
from memcalc.training.step import _trace

TEXT = {
    "vocab_size": 70,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
WINDOWS = {
    "model_type": "qwen2_5_vl",
    "text_config": TEXT,
    "vision_config": {
        "depth": 5,
        "hidden_size": 64,
        "intermediate_size": 120,
        "num_heads": 4,
        "out_hidden_size": 64,
        "window_size": 56,
        "fullatt_block_indexes": [2, 4],
    },
}
IMAGES = {
    "model_type": "qwen2_vl",
    "text_config": TEXT,
    "vision_config": {"depth": 3, "embed_dim": 64, "hidden_size": 64, "num_heads": 4, "mlp_ratio": 2},
}
SETUPS: dict[str, Any] = {
    "training": TrainingSetup(precision="bf16"),
    "eager": TrainingSetup(precision="bf16", attention="eager"),
    "mixed precision": TrainingSetup(precision="mixed-bf16"),
    "checkpointed": TrainingSetup(activation_checkpointing="full"),
    "core attention checkpointed": TrainingSetup(activation_checkpointing="selective"),
    "offloaded": TrainingSetup(activation_offloading=True),
    "inference": InferenceSetup(),
    "eager inference": InferenceSetup(attention="eager"),
}
PICTURES = {"batch": 3, "images_per_sequence": 2, "image_height": 28 * 9, "image_width": 28 * 7, "seq_len": 200}
"""Five by four windows in each of six images: two and one of each row and column are smaller."""


def every_length(lengths: Lengths) -> Iterator[tuple[int, int]]:
    for item in lengths:
        if isinstance(item, int):
            yield item, 1
        else:
            yield from [*every_length(item.body)] * item.times


@pytest.mark.parametrize("name", SETUPS)
@pytest.mark.parametrize("config", [WINDOWS, IMAGES], ids=["windows", "images"])
def test_few_pieces_answer_for_all(config: dict[str, Any], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, setup = ModelSpec.from_config(config), SETUPS[name].model_copy(update=PICTURES)
    quick = estimate(spec, setup).model_dump()
    _trace.cache_clear()
    monkeypatch.setattr(equal_pieces, "_few", every_length)
    assert estimate(spec, setup).model_dump() == quick
    _trace.cache_clear()


@pytest.mark.parametrize("name", ["mixed precision", "checkpointed", "eager inference"])
def test_one_image_stands_for_many_that_are_put_together_out_of_tiles(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tower = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    tower |= {"image_size": 28, "patch_size": 14}
    sections = {
        "text_config": TEXT | {"model_type": "llama"},
        "vision_config": tower | {"model_type": "clip_vision_model"},
    }
    config = {"model_type": "llava_next", **sections}
    spec = ModelSpec.from_config({**config, "image_grid_pinpoints": [[28, 56], [56, 28], [56, 56]]})
    setup = SETUPS[name].model_copy(update={"batch": 7, "images_per_sequence": 10, "image_size": 50})
    quick = estimate(spec, setup).model_dump()
    _trace.cache_clear()
    monkeypatch.setattr(llava_next, "ONE_BY_ONE", 70)
    assert estimate(spec, setup).model_dump() == quick
    _trace.cache_clear()


@pytest.mark.parametrize("times", [0, 1, 2, 3, 40])
def test_all_pieces_are_counted_and_few_are_run(times: int) -> None:
    lengths: Lengths = [Repeat([Repeat([4], times), 2], times), Repeat([3], times), 1]
    few = list(equal_pieces._few(lengths))
    counted = Counter[int]()
    for length, count in few:
        counted[length] += count
    assert counted == Counter(length for length, _ in every_length(lengths))
    assert len(few) < 20
