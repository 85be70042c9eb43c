"""What `memcalc families` says of every family is so."""

import json
from typing import Any

import pytest
from support.allocator_rows import ROWS
from support.cli_runs import run
from support.measured_rows import FOLDER

from memcalc import InferenceSetup, ModelSpec, TrainingSetup, estimate
from memcalc.models.registry import KINDS, families, family
from memcalc.tables.instruments import ON_ALLOCATOR, ON_BOTH
from memcalc.tables.lora_targets import REFUSED

CONFIGS: dict[str, dict[str, Any]] = {}
HOLLOW: dict[str, bool] = {}
"""Whether all rows of a family are the allocator's."""
for _path in sorted(FOLDER.glob("*.jsonl")):
    for _line in _path.read_text().splitlines():
        _case = json.loads(_line)["case"]
        _type = _case["config"]["model_type"]
        CONFIGS.setdefault(_type, _case["config"])
        HOLLOW[_type] = HOLLOW.get(_type, True) and _case.get("hollow", False)


@pytest.mark.parametrize("model_type", sorted(CONFIGS))
def test_every_measured_family_trains_generates_and_is_adapted(model_type: str) -> None:
    spec = ModelSpec.from_config(CONFIGS[model_type])
    targets = "in_proj" if model_type in REFUSED else "all-linear"  # PEFT refuses the mixers' output projections
    whole = estimate(spec, TrainingSetup())
    adapted = estimate(spec, TrainingSetup(lora_rank=1, lora_targets=targets))
    assert whole.saved_for_backward_bytes
    assert 0 < adapted.model.parameters.trainable < whole.model.parameters.trainable
    assert estimate(spec, InferenceSetup()).peak.allocated_bytes < whole.peak.allocated_bytes


def test_the_table_has_a_line_for_every_family() -> None:
    heads, *lines = run("families", env={"COLUMNS": "200"}).stdout.splitlines()
    assert heads.split("  ")[0] == "model_type"
    table = [line for line in lines[: lines.index("")] if not line.startswith(" ")]
    assert [line for line in table if line.endswith(":")] == [f"{title}:" for title in KINDS.values()]
    assert sorted(line.split()[0] for line in table if not line.endswith(":")) == list(families())
    assert any(line.startswith("llama ") and "q_proj, v_proj" in line for line in table)


@pytest.mark.parametrize("command", ["families", "optimizers", "gpus"])
@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_tables_keep_within_the_terminal(command: str, width: int) -> None:
    lines = run(command, env={"COLUMNS": str(width)}).stdout.splitlines()
    assert max(map(len, lines)) <= width
    assert not any(line.endswith(" ") or "\x1b" in line for line in lines)


def test_what_both_instruments_measured_has_rows_of_both() -> None:
    assert {row["case"]["config"]["model_type"] for row in ROWS} >= ON_BOTH
    assert CONFIGS.keys() >= ON_BOTH


def test_what_the_allocator_alone_measured_has_no_rows_of_the_tracker() -> None:
    hollow = {model_type: every for model_type, every in HOLLOW.items() if model_type in ON_ALLOCATOR}
    assert hollow == dict.fromkeys(ON_ALLOCATOR, True)


@pytest.mark.parametrize("model_type", families())
def test_measured_rows_stand_behind_the_claim(model_type: str) -> None:
    assert ("measured rows" in family(model_type).verified) <= (model_type in CONFIGS)
