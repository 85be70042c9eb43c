"""`memcalc from-config`: what was read, the command it stands for, and the estimate of that very command."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from support.cli_runs import answer, refused, run
from support.paths import DATA

from memcalc.cli.options import declared
from memcalc.run_configs import option_names

FOLDER = DATA / "run_configs"

NOT_YET: set[str] = set()
"""Options that run files are translated to and that the command line does not have."""

_VALUES = {"LOSS_EAGER", "LOSS_LIGER", "LOSS_LIGER_ON_LOGITS", "LOSS_CHUNKED", "LOSS_CUT", "LOSS_TILED", "ZERO_PREFIX"}
OF_COMMANDS = {"mode", "task", "num_labels"}
"""Options that are not of a setup."""


def path(name: str) -> str:
    return str(FOLDER / name)


def names() -> set[str]:
    values = {key: value for key, value in vars(option_names).items() if key.isupper() and isinstance(value, str)}
    return {value for key, value in values.items() if key not in _VALUES} - OF_COMMANDS


def test_every_option_that_files_are_translated_to_exists() -> None:
    assert names() - declared().keys() <= NOT_YET


def test_the_setup_is_shown_without_a_model() -> None:
    text = run("from-config", path("axolotl/packed_qlora.yaml"), "--show-setup").stdout
    assert re.search(r"--optimizer +optimizer: paged_adamw_8bit → paged-adamw-8bit \(bitsandbytes\)", text)
    assert "ignored: 4 keys that do not change memory (--verbose lists them)" in text


def test_dead_keys_are_named() -> None:
    text = run("from-config", path("trl/grpo.yaml"), "--show-setup").stdout
    assert "lora_r: 4 has no effect: use_peft is not set" in text


def test_the_setup_as_json() -> None:
    found = json.loads(run("from-config", path("trl/new_sft.yaml"), "--show-setup", "--json").stdout)
    wanted = {"model", "framework", "setup", "mapped", "ignored", "dead", "unknown", "assumed"}
    assert wanted <= found.keys()
    assert found["setup"]["seq_len"] == 3200
    assert found["facts"]["tensor_shape"] == [1, 3200]


def options_of(name: str, *more: str) -> list[str]:
    return shlex.split(run("from-config", path(name), *more, "--as-options").stdout)


def numbers(found: dict[str, Any]) -> Any:
    return {key: found[key] for key in ("components", "phases", "peak")}


@pytest.mark.parametrize("name", ["llama_factory/lora.yaml", "ms_swift/lora.sh", "trl/old_sft.yaml"])
def test_as_options_is_the_same_estimate(name: str) -> None:
    words = options_of(name, "--model", "100M")
    assert words[:4] == ["memcalc", "estimate", "--params", "100M"]
    direct = answer("from-config", path(name), "--model", "100M")
    assert numbers(answer(*words[1:])) == numbers(direct)
    assert direct["setup"]["lora_rank"]


def test_options_of_the_command_line_go_before_the_files() -> None:
    found = answer("from-config", path("llama_factory/lora.yaml"), "--model", "100M", "--batch", "5", "--seq-len", "64")
    assert (found["setup"]["batch"], found["setup"]["seq_len"]) == (5, 64)


def test_what_was_taken_is_among_the_assumptions() -> None:
    found = answer("from-config", path("llama_factory/lora.yaml"), "--model", "100M")
    lines = [line if isinstance(line, str) else line["text"] for line in found["assumptions"]]
    assert any("longest sample cannot be known: took cutoff_len 1001" in line for line in lines)


def test_a_launch_line_behind_the_files() -> None:
    name = path("llama_factory/lora.yaml")
    found = json.loads(run("from-config", name, "--model", "100M", "--json", "--", "lora_rank=20").stdout)
    assert found["setup"]["lora_rank"] == 20


def test_a_launch_line_alone() -> None:
    found = json.loads(run("from-config", "--show-setup", "--json", "--", "vllm", "serve", "a/b", "-tp", "2").stdout)
    assert (found["model"], found["setup"]["tensor_parallel_size"]) == ("a/b", 2)


def test_standard_input() -> None:
    text = Path(path("axolotl/packed_sdpa.yaml")).read_text(encoding="utf-8")
    found = json.loads(run("from-config", "-", "--show-setup", "--json", input=text).stdout)
    assert found["framework"] == "axolotl"


def test_a_model_of_a_folder(tmp_path: Path) -> None:
    config = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    config |= {"num_attention_heads": 4, "vocab_size": 256, "architectures": ["LlamaForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 512}), encoding="utf-8")
    found = answer("from-config", path("vllm/serve.sh"), "--model", str(tmp_path), "--tensor-parallel-size", "1")
    assert found["setup"]["seq_len"] == 512


@pytest.mark.parametrize(
    ("code", "words", "sentence"),
    [
        (2, (), "needs a file"),
        (1, ("/no/such.yaml",), "cannot be read"),
        (2, (path("trl/no_cap.yaml"), "--model", "100M"), "--seq-len"),
        (2, (path("hf/arguments.json"), "--seq-len", "64"), "--model"),
        (2, (path("trl/no_cap.yaml"), "--framework", "axolotle", "--show-setup"), "did you mean 'axolotl'"),
        (2, (path("trl/no_cap.yaml"), "--release", "new", "--show-setup"), "--release needs a release"),
        (2, (path("vllm/serve.yaml"), "--show-setup", "--", "rm", "x"), "starts no run"),
    ],
)
def test_what_is_refused(code: int, words: tuple[str, ...], sentence: str) -> None:
    assert sentence in refused(code, "from-config", *words)


def test_paths_in_a_file_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    run_file = tmp_path / "run.yaml"
    run_file.write_text(f"base_model: {tmp_path}\nmicro_batch_size: 1\nsequence_len: 8\n", encoding="utf-8")
    assert "not followed; give --model PATH" in refused(2, "from-config", str(run_file))


def test_options_beside_a_file_count_for_what_is_shown(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        "base_model: org/m\nsequence_len: 4096\nmicro_batch_size: 4\ndatasets:\n  - path: d\n    type: alpaca\n"
    )
    command = ("from-config", str(path), "--model", "8B", "--framework", "axolotl", "--seq-len", "1024", "--gpus", "8")
    line = run(*command, "--as-options").stdout
    assert "--seq-len 1024" in line
    assert "--gpus 8" in line
    shown = json.loads(run(*command, "--show-setup", "--json").stdout)
    assert shown["setup"]["seq_len"] == 1024
    assert "--gpu is for the estimate" in run(*command, "--show-setup", "--gpu", "24GB", code=2).stderr
