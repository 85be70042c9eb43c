"""`memcalc trace`: its text, its JSON, and what it refuses."""

import json

from support.cli_runs import refused, run

OPTIONS = ("--seq-len", "64")


def test_the_text_around_the_peak() -> None:
    lines = run("trace", "1B", *OPTIONS, "--around-peak", "2").stdout.splitlines()
    assert lines[0].split() == ["tick", "dies", "bytes", "live", "phase", "row", "part", "block", "operation", "module"]
    assert sum("(its most)" in line for line in lines) == 1
    assert 2 <= len(lines) <= 6
    assert all(line.isascii() for line in run("trace", "1B", *OPTIONS, "--ascii").stdout.splitlines())


def test_the_json() -> None:
    found = json.loads(run("trace", "1B", *OPTIONS, "--mode", "inference", "--phase", "decode", "--json").stdout)
    assert {line["phase"] for line in found} == {"decode"}
    assert found[0].keys() >= {"tick", "dies", "bytes", "row", "part", "block", "operation"}


def test_what_is_refused() -> None:
    assert "--phase" in refused(2, "trace", "1B", *OPTIONS, "--phase", "step")
    assert "--around-peak" in refused(2, "trace", "1B", "--around-peak", "x")
    assert "--markdown" in refused(2, "trace", "1B", "--markdown")
    assert "--check" in refused(2, "trace", "1B", "--gpu", "T4", "--check")
