"""The events of a whole model out of one block of each kind are those of a model in which every block is traced."""

from typing import Any

import pytest
from support.allocator_rows import ROWS, name, traced

from memcalc.allocator.events import Events
from memcalc.allocator.training_events import unrolled
from memcalc.allocator.unrolled import NotUniformError

DEEP: list[dict[str, Any]] = [row["case"] for row in ROWS if row["case"].get("seq", 0) < 600][::3]


def deeper(case: dict[str, Any]) -> dict[str, Any]:
    """The case with a model of more blocks."""
    depths = {key: 7 for key in ("num_hidden_layers", "num_layers", "n_layer", "n_layers") if key in case["config"]}
    config = case["config"] | depths
    for key in ("layer_types", "mlp_layer_types"):
        if key in config:
            config[key] = [config[key][i % len(config[key])] for i in range(7)]
    return {**case, "config": config}


def written(case: dict[str, Any], every_block: bool) -> tuple[list[int], list[int]]:
    events = Events()
    gradients = unrolled(traced(case, False, every_block)).append_to(events)
    return in_one_order(events.codes), sorted(gradients)


def in_one_order(codes: list[int]) -> list[int]:
    """Frees between two requests sorted: their order changes nothing."""
    found: list[int] = []
    freed: list[int] = []
    for code in codes:
        if code < 0:
            freed.append(code)
            continue
        found += [*sorted(freed), code]
        freed = []
    return found + sorted(freed)


@pytest.mark.parametrize("case", [deeper(case) for case in DEEP], ids=[name({"case": case}) for case in DEEP])
def test_untraced_blocks_do_what_traced_ones_do(case: dict[str, Any]) -> None:
    try:
        found = written(case, every_block=False)
    except NotUniformError:
        assert case["config"]["model_type"] == "t5"  # what its first block makes is handed from block to block
        return
    assert found == written(case, every_block=True)
