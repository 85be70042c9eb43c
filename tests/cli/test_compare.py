"""`memcalc compare`: columns are the estimates themselves."""

import json
from pathlib import Path

from support.cli_runs import run


def test_methods_side_by_side() -> None:
    text = run("compare", "1B", "--methods", "full,lora,qlora", "--seq-len", "512", "--gpu", "RTX-3060").stdout
    heads = text.splitlines()[0].split()
    assert heads == ["1B", "full", "1B", "lora", "1B", "qlora"]
    assert "does not fit" in text
    assert "-" in text


def test_columns_are_estimates() -> None:
    found = json.loads(run("compare", "1B", "2B", "--seq-len", "512", "--json").stdout)
    alone = json.loads(run("estimate", "--params", "2B", "--seq-len", "512", "--json").stdout)
    assert [column["column"] for column in found] == ["1B", "2B"]
    assert found[1]["components"] == alone["components"]


def test_what_is_given_comes_before_what_the_method_stands_for() -> None:
    job = ("compare", "1B", "--methods", "full,lora", "--lora-rank", "4", "--lora-targets", "all-linear", "--json")
    found = json.loads(run(*job).stdout)
    assert {column["setup"]["lora_rank"] for column in found} == {4}


def test_what_compare_needs() -> None:
    assert "two columns" in run("compare", "1B", code=2).stderr
    assert "--methods" in run("compare", "1B", "--methods", "full,lorra", code=2).stderr
    assert "--check" in run("compare", "1B", "2B", "--check", "--gpu", "T4", code=2).stderr


def test_markdown_is_the_same_table() -> None:
    text = run("compare", "1B", "2B", "--seq-len", "64").stdout
    table = run("compare", "1B", "2B", "--seq-len", "64", "--markdown").stdout
    assert table.splitlines()[1] == "| --- | --: | --: |"
    assert table.replace("|", " ").split()[5:] == text.split()[2:]


def test_a_snapshot_that_memcalc_wrote_is_the_estimate(tmp_path: Path) -> None:
    path = tmp_path / "own.pickle"
    run("estimate", "--params", "100M", "--batch", "2", "--snapshot", str(path))
    text = run("compare", "100M", "--batch", "2", "--snapshot", str(path)).stdout
    assert text.count("(the same)") == 3
    assert text.count("every size is there as often in both") == 3
