"""`memcalc explain`: its text, its JSON, and what it refuses."""

import json
from pathlib import Path

import pytest
from support.cli_runs import refused, run
from support.paths import ROOT
from support.shapes import decoder

OPTIONS = ("--seq-len", "300", "--batch", "8", "--precision", "bf16")


@pytest.fixture
def config(tmp_path: Path) -> str:
    """A config.json of a small Llama."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(decoder(64, 4, 4, 2, 128, 320)))
    return str(path)


def test_the_json_sums_to_the_box_and_is_described(config: str) -> None:
    found = json.loads(run("explain", config, *OPTIONS, "--json").stdout)
    report = json.loads(run("from-file", config, *OPTIONS, "--json").stdout)
    assert found["rows"] == {name: row["peak_bytes"] for name, row in report["components"].items()}
    assert found["total_bytes"] == report["peak"]["process_bytes"] == sum(one["bytes"] for one in found["tensors"])
    assert found["assumptions"] == report["assumptions"]
    schema = json.loads(run("schema", "explain").stdout)
    assert schema["properties"].keys() == found.keys()
    assert schema["$defs"]["TensorEntry"]["properties"].keys() == found["tensors"][0].keys()


def test_row_and_top(config: str) -> None:
    whole = json.loads(run("explain", config, *OPTIONS, "--json").stdout)
    found = json.loads(run("explain", config, *OPTIONS, "--json", "--row", "activations", "--top", "3").stdout)
    assert [one["row"] for one in found["tensors"]] == ["activations"] * 3
    assert found["left_out_bytes"] + sum(one["bytes"] for one in found["tensors"]) == whole["total_bytes"]


def test_the_text(config: str) -> None:
    text = " ".join(run("explain", config, *OPTIONS, "--row", "act", "--top", "4", "--width", "120").stdout.split())
    assert "backward of head and loss, the peak: " in text
    assert "4 × [2400, 128] bf16 ACTIVATIONS: model.layers.{0..3}.mlp.gate_proj · linear (made in forward)" in text
    assert "saved by silu of model.layers.{n}.mlp for backward" in text
    assert "batch (8) × seq_len (300) × intermediate_size (128) × 2 = 614,400 bytes × 4" in text
    plain = run("explain", config, *OPTIONS, "--ascii").stdout
    assert plain.isascii()
    assert all(len(line) <= 80 for line in plain.splitlines())


def test_models_of_every_kind(config: str) -> None:
    assert "layers.{0..3}" in run("explain", config, "--seq-len", "64", "--phase", "backward").stdout
    assert "KV cache" in run("explain", config, "--mode", "inference", "--row", "other", "--engine", "vllm").stdout
    qlora = str(ROOT / "examples" / "axolotl_qlora.yaml")
    assert "lora_A" in run("explain", qlora, "--model", "1B", "--phase", "step", "--top", "400").stdout


def test_what_is_refused() -> None:
    assert "MODEL" in refused(2, "explain", "what?")
    assert "--row" in refused(2, "explain", "1B", "--row", "o")
    assert "choose one" in refused(2, "explain", "1B", "--phase", "step", "--at", "step")
    assert "backward of block 3" in refused(2, "explain", "1B", "--at", "backward of blok 3")
    assert "--markdown" in refused(2, "explain", "1B", "--markdown")
    assert "report, explain" in refused(2, "schema", "what")
