"""The options of a model mean the same on every command that takes one."""

import json
from pathlib import Path

import pytest
from support.cli_runs import run

TINY = '{"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 99}'
COMMANDS = [
    ["explain", "--top", "1"],
    ["trace", "--around-peak", "1"],
    ["timeline"],
    ["fit", "--budget", "40GB"],
    ["compare", "--methods", "full,lora"],
    ["sweep", "--batch", "1,2"],
]


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: words[0])
def test_a_shape_is_for_a_count(words: list[str], tmp_path: Path) -> None:
    command, *options = words
    like = run(command, "100M", *options, "--num-kv-heads", "2", "--json").stdout
    assert like != run(command, "100M", *options, "--json").stdout
    config = tmp_path / "config.json"
    config.write_text(TINY)
    assert "says nothing about" in run(command, str(config), *options, "--like", "qwen3", code=2).stderr
    assert "says nothing about '100M'" in run(command, "100M", *options, "--task", "embedding", code=2).stderr


def test_a_task_counts_wherever_a_model_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(TINY)
    task = ("--task", "sequence-classification", "--num-labels", "3", "--json")
    columns = json.loads(run("compare", str(tmp_path), *task, "--methods", "full,head").stdout)
    alone = json.loads(run("from-file", str(tmp_path), *task).stdout)
    assert columns[0]["components"] == alone["components"]


def test_what_a_file_decides_counts_wherever_it_is_read(tmp_path: Path) -> None:
    """A GGUF file is served by llama.cpp, also where it is swept or fitted."""
    from support.gguf_files import gguf, llama_gguf

    start, size = gguf(*llama_gguf(depth=2))
    path = tmp_path / "model.gguf"
    path.write_bytes(start + bytes(size - len(start)))
    alone = json.loads(run("from-file", str(path), "--mode", "inference", "--json").stdout)
    row = json.loads(run("sweep", str(path), "--mode", "inference", "--batch", "1,2", "--json").stdout.splitlines()[0])
    assert row["process_bytes"] == alone["peak"]["process_bytes"]
    fit = json.loads(run("fit", str(path), "--mode", "inference", "--budget", "9GB", "--json").stdout)
    assert fit["gpus"][0]["process_bytes"] == alone["peak"]["process_bytes"]


@pytest.mark.parametrize("text", ["64..1", "1..x", "0..8*2", "8..16+0", "..8", "1..64..2", "1..99999999999"])
def test_a_bad_range_has_one_sentence(text: str) -> None:
    said = run("sweep", "100M", "--batch", text, code=2).stderr
    assert said.startswith(f"memcalc: --batch '{text}' is no range")
    assert said.endswith(": give one such as 1..64, 256..4096+256 or 1..64*2.\n")


def test_a_model_in_the_place_of_a_command_is_echoed_with_its_options_but_no_secret() -> None:
    said = run("100M", "--token", "hf_SECRET", code=2).stderr.splitlines()[0]
    assert said == "memcalc estimate --params 100M --token '***'"
    assert "hf_SECRET" not in run("100M", "--tokn=hf_SECRET", code=2).stderr


def test_a_file_that_is_not_there_is_no_command() -> None:
    assert "nonexist.json cannot be read" in run("./nonexist.json", code=1).stderr
    assert "'nonexist.yaml' cannot be read" in run("nonexist.yaml", code=1).stderr


def test_columns_differ() -> None:
    assert "named twice" in run("compare", "1B", "1B", code=2).stderr
