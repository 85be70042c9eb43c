"""Each small file of `tests/data/run_configs` says what its traps are; `facts.jsonl` has what must come out."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.paths import DATA

from memcalc.run_configs.output import as_json
from memcalc.run_configs.read import read

FOLDER = DATA / "run_configs"
ROWS = [json.loads(line) for line in (FOLDER / "facts.jsonl").read_text(encoding="utf-8").splitlines()]


def test_every_file_has_its_facts() -> None:
    files = {str(path.relative_to(FOLDER)) for path in FOLDER.rglob("*") if path.is_file()}
    assert {row["file"] for row in ROWS} == files - {"facts.jsonl"}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["file"])
def test_facts(row: dict[str, Any]) -> None:
    found = read([str(FOLDER / row["file"])])
    assert found.framework == row["framework"]
    assert found.model == row["model"]
    assert found.setup == row["setup"]
    assert found.dead == row["dead"]
    assert found.unknown == row["unknown"]
    assert len(found.asked) == row["asked"]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["file"])
def test_every_value_of_the_setup_says_where_it_is_from(row: dict[str, Any]) -> None:
    shown = as_json(read([str(FOLDER / row["file"])]))
    options = {entry["option"] for entry in shown["mapped"]}
    assert shown["setup"].keys() <= options
    assert all(set(entry) == {"key", "value", "option", "meaning", "default"} for entry in shown["mapped"])


@pytest.mark.parametrize("path", sorted(FOLDER.rglob("*.*")), ids=lambda path: path.name)
def test_what_is_secret_is_not_echoed(path: Path) -> None:
    if path.name == "facts.jsonl":
        return
    assert "not_to_be_shown" not in (text := json.dumps(as_json(read([str(path)]))))
    assert "not-to-be-shown" not in text


def test_a_key_that_is_absent_is_marked_as_a_default() -> None:
    shown = as_json(read([str(FOLDER / "trl/new_sft.yaml")]))
    rows = {entry["key"]: entry for entry in shown["mapped"]}
    assert rows["activation_checkpointing"]["default"] is True
    assert rows["activation_checkpointing"]["option"] == "activation_checkpointing"
    assert rows["per_device_train_batch_size"]["default"] is False


def test_python_is_parsed_and_never_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    read([str(FOLDER / "unsloth/finetune.py")])
    assert list(tmp_path.iterdir()) == []
