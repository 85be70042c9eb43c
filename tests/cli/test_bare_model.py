"""`memcalc MODEL`: the command that a model stands for, and tables for programs."""

import json
from pathlib import Path

import pytest
from support.cli_runs import run

from memcalc.cli.bare_model import meant_by


def test_a_count_is_an_estimate() -> None:
    result = run("1B", "--seq-len", "128", "--json")
    assert result.stderr == "memcalc estimate --params 1B --seq-len 128 --json\n"
    assert result.stdout == run("estimate", "--params", "1B", "--seq-len", "128", "--json").stdout


def test_what_a_word_stands_for(tmp_path: Path) -> None:
    config, run_file = tmp_path / "tiny.json", tmp_path / "train.yaml"
    config.write_text('{"model_type": "llama"}')
    run_file.write_text("base_model: org/name\n")
    assert meant_by(str(config)) == ["from-file", str(config)]
    assert meant_by(str(tmp_path)) == ["from-file", str(tmp_path)]
    assert meant_by(str(run_file)) == ["from-config", str(run_file)]
    assert meant_by("meta-llama/Llama-3.1-8B") == ["from-hub", "meta-llama/Llama-3.1-8B"]
    assert meant_by("estimat") is None


def test_an_unknown_word_is_still_an_error() -> None:
    assert "estimate" in run("estimat", code=2).stderr


@pytest.mark.parametrize("command", ["gpus", "optimizers", "families"])
def test_tables_as_json(command: str) -> None:
    rows = json.loads(run(command, "--json").stdout)
    text = run(command).stdout
    assert all(f"\n{row.get('name', row.get('model_type'))}" in text for row in rows)
    assert all(row.keys() == rows[0].keys() for row in rows)
