"""`memcalc timeline`: for every MODEL that `memcalc MODEL` takes."""

import json
from pathlib import Path

import pytest
from support.cli_runs import refused, run
from support.paths import ROOT
from support.shapes import decoder


def test_a_count() -> None:
    text = run("timeline", "1B", "--width", "72").stdout
    assert "forward" in text
    assert "\x1b" not in text
    assert "\x1b[" in run("timeline", "1B", "--color").stdout


@pytest.mark.parametrize("mode", ["training", "inference"])
def test_the_json_has_the_estimate_as_its_peak(mode: str) -> None:
    job = ("1B", "--mode", mode, "--seq-len", "300", "--json")
    found = json.loads(run("timeline", *job).stdout)
    report = json.loads(run("estimate", "--params", *job).stdout)
    top = found["samples"][found["peak"]["sample"]]
    assert top["row_bytes"] == {name: row["peak_bytes"] for name, row in report["components"].items()}
    assert found["peak"]["moment"] == report["peak"]["moment"]


def test_a_file_and_a_run_file(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(decoder(64, 3, 4, 2, 128, 320)))
    assert "block 1" in run("timeline", str(path), "--task", "sequence-classification").stdout
    qlora = str(ROOT / "examples" / "axolotl_qlora.yaml")
    assert "backward" in run("timeline", qlora, "--model", "1B").stdout


def test_its_schema() -> None:
    schema = json.loads(run("schema", "timeline").stdout)
    found = json.loads(run("timeline", "1B", "--seq-len", "64", "--json").stdout)
    assert schema["properties"].keys() == found.keys()


def test_check() -> None:
    run("timeline", "8B", "--gpu", "T4", "--check", code=3)


def test_what_is_refused() -> None:
    assert "MODEL" in refused(2, "timeline", "what?")
    assert "--markdown" in refused(2, "timeline", "1B", "--markdown")
    assert "--base" in refused(2, "timeline", "1B", "--base", "x")
    assert "--model" in refused(2, "timeline", "1B", "--model", "2B")


def test_of_a_pipeline_one_micro_batch_is_shown() -> None:
    shown = run("timeline", "1B", "--gpus", "2", "--pipeline-parallel-size", "2", "--seq-len", "64").stdout
    assert (
        "micro-batch" in run("explain", "1B", "--gpus", "2", "--pipeline-parallel-size", "2", "--seq-len", "64").stdout
    )
    assert "block 1 → 6" in shown


@pytest.mark.parametrize(("count", "mark"), [("8B", " 100 GiB ┤"), ("405B", "4000 GiB ┤")])
def test_sizes_beside_the_axis_are_whole(count: str, mark: str) -> None:
    assert mark in run("timeline", count).stdout
