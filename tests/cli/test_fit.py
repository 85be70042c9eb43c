"""`memcalc fit`, and what stands below a report that does not fit."""

import json

from support.cli_runs import run

JOB = ("--seq-len", "1024", "--precision", "bf16", "--lora-rank", "8", "--lora-targets", "all-linear")


def test_a_table_for_several_gpus() -> None:
    text = run("fit", "1B", "--gpu", "RTX-3060,RTX-4090", *JOB, "--width", "120").stdout
    assert "largest micro-batch (--batch)" in text
    assert "longest sequence (--seq-len)" in text
    assert "largest LoRA rank (--lora-rank)" in text
    assert text.count("smallest GPU") == 2


def test_json_has_whole_numbers_and_remedies() -> None:
    found = json.loads(run("fit", "1B", "--budget", "4GB", *JOB, "--json").stdout)
    (answer,) = found["gpus"]
    assert answer["gpu"] == "4GB"
    assert isinstance(answer["largest_batch"], int)
    remedies = answer["remedies"]
    assert {"name", "cost", "options", "change", "saved_bytes", "fits"} == set(remedies["alone"][0])


def test_what_fit_needs() -> None:
    assert "--budget" in run("fit", "8B", code=2).stderr
    assert "--budget" in run("fit", "8B", "--gpu", "24GB", "--budget", "24GB", code=2).stderr
    assert "nothing-here" in run("fit", "nothing-here", "--gpu", "24GB", code=2).stderr
    assert "--check" in run("fit", "8B", "--gpu", "24GB", "--check", code=2).stderr


def test_remedies_stand_below_what_does_not_fit() -> None:
    job = ("estimate", "--params", "8B", "--gpu", "RTX-4090", "--batch", "4")
    result = run(*job, "--check", code=3)
    assert "It fits with" in result.stdout
    assert "--lora-rank 16" in result.stdout
    lines = result.stdout.rstrip().splitlines()
    for said in ("It fits with", "As it is, it fits"):
        index = next(index for index, line in enumerate(lines) if line.startswith(said))
        run(*job, *lines[index + 1].split(), "--check")
    assert "What makes it smaller" not in run("estimate", "--params", "1B", "--gpu", "H100").stdout
    json.loads(run(*job, "--json").stdout)


def test_a_run_of_many_lengths_is_refused_and_has_no_remedies() -> None:
    assert "give --seq-len with the longest" in run("fit", "1B", "--gpu", "24GB", "--lengths", "64..512", code=2).stderr
    job = ("estimate", "1B", "--gpu", "8GB", "--lengths", "64..96", "--max-steps", "2", "--check")
    assert "not searched for with --lengths" in run(*job, code=3).stdout
