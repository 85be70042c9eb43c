"""`memcalc sweep`: every combination, as people and as programs read it."""

import csv
import io
import json

import pytest
from support.cli_runs import run

from memcalc.decide import side_by_side
from memcalc.decide.axes import combinations, read_axis
from memcalc.errors import UsageError


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("1..4", ("1", "2", "3", "4")),
        ("1..16*2", ("1", "2", "4", "8", "16")),
        ("256..1024+256", ("256", "512", "768", "1024")),
        ("1024,2048", ("1024", "2048")),
        ("1,1..3,8", ("1", "2", "3", "8")),
        ("bf16,fp32", ("bf16", "fp32")),
    ],
)
def test_values(text: str, values: tuple[str, ...]) -> None:
    assert read_axis("batch", "--batch", text).values == values


@pytest.mark.parametrize("text", ["4..1", "1..4*1", "0..4*2", "1..4+0", "1,,2", "1..999999999"])
def test_no_values(text: str) -> None:
    with pytest.raises(UsageError, match="--batch"):
        read_axis("batch", "--batch", text)


def test_too_many() -> None:
    axes = [read_axis(name, f"--{name}", "1..1000") for name in ("batch", "seq_len")]
    with pytest.raises(UsageError, match="1,000,000"):
        next(combinations(axes))


def test_a_grid_of_two_options() -> None:
    lines = run("sweep", "1B", "--batch", "1..4*2", "--seq-len", "512,2048", "--gpu", "24GB").stdout.splitlines()
    assert lines[0] == "--batch down, --seq-len across"
    assert lines[1].split() == ["512", "2048"]
    assert [line.split()[0] for line in lines[2:5]] == ["1", "2", "4"]
    assert lines[2].split()[-1] == "✓"
    assert lines[4].split()[-1] == "×"


def test_csv_and_json_say_the_same_as_estimate() -> None:
    job = ("sweep", "1B", "--batch", "1,2", "--precision", "bf16,fp32", "--seq-len", "256", "--gpu", "24GB")
    rows = [json.loads(line) for line in run(*job, "--json").stdout.splitlines()]
    table = list(csv.DictReader(io.StringIO(run(*job, "--csv").stdout)))
    assert [str(row["process_bytes"]) for row in rows] == [row["process_bytes"] for row in table]
    last = run("estimate", "--params", "1B", "--batch", "2", "--precision", "fp32", "--seq-len", "256", "--json")
    assert rows[-1]["allocated_bytes"] == pytest.approx(json.loads(last.stdout)["peak"]["allocated_bytes"], rel=0.01)
    assert len(rows) == 4


def test_a_setup_that_cannot_be_is_a_row_with_its_error() -> None:
    lines = run("sweep", "1B", "--lora-rank", "8,99999", "--lora-targets", "all-linear", "--json").stdout.splitlines()
    rows = [json.loads(line) for line in lines]
    assert rows[0]["error"] is None
    assert "--lora-rank 99999" in rows[1]["error"]


def test_what_sweep_needs() -> None:
    assert "several values" in run("sweep", "1B", code=2).stderr
    assert "--csv" in run("sweep", "1B", "--batch", "1,2", "--csv", "--json", code=2).stderr
    assert "--batch" in run("sweep", "1B", "--batch", "1,two", code=2).stderr


def test_many_setups_are_those_of_estimates_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """On several processors, and with setups that share a trace computed one after another."""
    monkeypatch.setattr(side_by_side, "ALONE", 10)
    job = ("sweep", "1B", "--optimizer", "adamw,sgd", "--batch", "1..6", "--seq-len", "64", "--json")
    rows = [json.loads(line) for line in run(*job).stdout.splitlines()]
    assert [(row["optimizer"], row["batch"]) for row in rows] == [
        (optimizer, batch) for batch in range(1, 7) for optimizer in ("adamw", "sgd")
    ]
    for row in (rows[3], rows[-1]):
        one = ("--optimizer", row["optimizer"], "--batch", str(row["batch"]), "--seq-len", "64", "--json")
        found = json.loads(run("estimate", "--params", "1B", *one).stdout)
        assert row["process_bytes"] == found["peak"]["process_bytes"]
    assert "--batch" in run("sweep", "1B", "--batch", "1..11,x", code=2).stderr


@pytest.mark.parametrize(
    "given", [("--lengths", "32..40", "--max-steps", "2"), ("--alloc-conf", "max_split_size_mb:64", "--seq-len", "32")]
)
def test_the_allocator_is_simulated_where_that_is_asked_for(given: tuple[str, ...]) -> None:
    job = (*given, "--lora-rank", "4", "--gpu", "80GB", "--json")
    rows = [json.loads(line) for line in run("sweep", "1B", "--batch", "1,2", *job).stdout.splitlines()]
    assert [row["assumption"] for row in rows] == [None, None]
    one = json.loads(run("estimate", "1B", "--batch", "2", *job).stdout)
    assert rows[1]["process_bytes"] == one["peak"]["process_bytes"]


def test_so_many_setups_are_not_simulated() -> None:
    assert "200 at most" in run("sweep", "1B", "--batch", "1..201", "--lengths", "32..40", code=2).stderr
    assert "belongs to --lengths" in run("sweep", "1B", "--batch", "1,2", "--max-steps", "3", code=2).stderr


def test_the_reserve_is_said_to_be_assumed() -> None:
    job = ("sweep", "1B", "--batch", "1,2", "--seq-len", "64", "--gpu", "24GB")
    assert "allocator reserve 2%, not simulated" in run(*job).stdout
    assert "not simulated" in run(*job, "--markdown").stdout
    given = run(*job, "--allocator-reserve", "0.1", "--json").stdout.splitlines()
    assert [json.loads(line)["assumption"] for line in given] == [None, None]
