"""Folders of video pipelines: frames as the pipeline makes them, two denoisers, what `inspect` and `fit` say."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from support.cli_runs import answer, run

WAN = {"num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 128, "text_dim": 64, "ffn_dim": 256}
UMT5 = {"model_type": "umt5", "d_model": 64, "d_ff": 128, "num_layers": 2, "num_heads": 4, "d_kv": 16}
PARTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "transformer": ("diffusers", "WanTransformer3DModel", WAN),
    "transformer_2": ("diffusers", "WanTransformer3DModel", WAN),
    "vae": ("diffusers", "AutoencoderKLWan", {"base_dim": 16}),
    "text_encoder": ("transformers", "UMT5EncoderModel", UMT5 | {"vocab_size": 1000, "dtype": "bfloat16"}),
}
SIDES = ("--height", "128", "--width", "128")


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """A small pipeline of Wan 2.2 without weights."""
    index = {name: [library, kind] for name, (library, kind, _) in PARTS.items()}
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": "WanPipeline", **index}))
    for name, (_, kind, config) in PARTS.items():
        (tmp_path / name).mkdir()
        key = "architectures" if "model_type" in config else "_class_name"
        written = {**config, key: [kind] if key == "architectures" else kind}
        (tmp_path / name / "config.json").write_text(json.dumps(written))
    return str(tmp_path)


def ask(folder: str, *options: str) -> dict[str, Any]:
    """The report of the pipeline in inference."""
    return answer("from-file", folder, "--mode", "inference", *SIDES, *options)


@pytest.mark.parametrize(("asked", "made"), [(79, 77), (80, 81), (81, 81), (83, 81)])
def test_frames_are_made_as_the_pipeline_rounds_them(folder: str, asked: int, made: int) -> None:
    report = ask(folder, "--num-frames", str(asked))
    assert report["setup"]["num_frames"] == made
    assert report["phases"] == ask(folder, "--num-frames", str(made))["phases"]
    assert ("rounded to 81" in str(report["assumptions"])) == (asked in (80, 83))


def test_the_second_denoiser_is_counted_and_waits_its_turn(folder: str) -> None:
    parts = {part["name"]: part["bytes"] for part in ask(folder)["components"]["model_weights"]["parts"]}
    assert parts["transformer bf16"] == parts["transformer_2 bf16"] > 0
    offloaded = ask(folder, "--cpu-offload", "model", "--num-frames", "5")
    assert any("host memory: " in str(line) and "transformer_2 bf16" in str(line) for line in offloaded["assumptions"])


def test_inspect_counts_every_component(folder: str) -> None:
    said = run("inspect", folder).stdout
    counts = dict(re.findall(r"^(?:  )?(\w+) +([\d,]+)\b", said, re.M))
    numbers = {name: int(count.replace(",", "")) for name, count in counts.items()}
    assert numbers["parameters"] == sum(numbers[name] for name in PARTS) > 0


def test_fit_finds_the_largest_batch_of_a_pipeline(folder: str) -> None:
    found = run("fit", folder, "--mode", "inference", "--gpu", "RTX-4090", *SIDES, "--num-frames", "5").stdout
    largest = int(found.split("largest micro-batch (--batch)")[1].split()[0].replace(",", ""))
    given = ("--gpu", "RTX-4090", "--num-frames", "5")
    assert ask(folder, *given, "--batch", str(largest))["gpu"]["fits"]
    assert not ask(folder, *given, "--batch", str(largest + 1))["gpu"]["fits"]
