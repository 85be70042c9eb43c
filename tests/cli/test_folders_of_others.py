"""Folders of pipelines, variants, and other libraries: what is counted, and what is refused rather than left out."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.cli_runs import answer, assumes, refused, run, weights
from support.shapes import decoder
from support.weights import Tensors, layers, write, write_json

LLAMA = decoder(64, 3, 4, 2, 192, 1000, architectures=["LlamaForCausalLM"], tie_word_embeddings=False)
LLAMA |= {"torch_dtype": "bfloat16"}
WHOLE: Tensors = {
    "model.embed_tokens.weight": ("BF16", (1000, 64)),
    "model.norm.weight": ("BF16", (64,)),
    "lm_head.weight": ("BF16", (1000, 64)),
    **layers(3),
}


def folder(path: Path, tensors: Tensors, **config: Any) -> str:
    write_json(path / "config.json", LLAMA | config)
    write(path / "model.safetensors", tensors)
    return str(path)


def pipeline(path: Path) -> str:
    names = {"transformer": 3, "text_encoder": 2, "vae": 1}
    index = {name: ["diffusers", name.title()] for name in names} | {"scheduler": ["diffusers", "EulerScheduler"]}
    write_json(path / "model_index.json", {"_class_name": "P", **index})
    for name, count in names.items():
        write_json(path / name / "config.json", {"_class_name": name})
        write(path / name / "diffusion_pytorch_model.safetensors", layers(count))
    return str(path)


FLUX = ("--lora-rank", "16", "--batch", "2", "--image-size", "512", "--precision", "mixed-bf16")


def test_a_pipeline_refuses_what_it_does_not_use(tmp_path: Path) -> None:
    """LoRA of FLUX at batch 2 and 512 pixels ran out of an A100-80GB; weights alone would fit."""
    path = pipeline(tmp_path)
    message = refused(2, "from-file", path, *FLUX, "--gpu", "A100-80GB", "--check")
    assert all(option in message for option in ("--lora-rank", "--batch", "--image-size", "--precision"))
    for options in (
        ("--seq-len", "9"),
        ("--engine", "vllm", "--mode", "inference"),
        ("--train", "all"),
        ("--generic",),
    ):
        assert options[0] in refused(2, "from-file", path, *options)
    assert "weights only" in run("from-file", path).stdout
    assert "None" not in run("from-file", path).stdout


def test_components_that_cannot_be_read_are_not_left_out(tmp_path: Path) -> None:
    path = pipeline(tmp_path)
    for file in (tmp_path / "text_encoder").glob("*.safetensors"):
        file.rename(file.with_name("pytorch_model.bin"))
    assert "text_encoder" in refused(1, "from-file", path)
    assert "pickle" in refused(1, "from-file", path)
    write_json(tmp_path / "text_encoder" / "config.json", LLAMA)
    found = answer("from-file", path)
    parts = {part["name"]: part["bytes"] for part in found["components"]["model_weights"]["parts"]}
    assert parts["text_encoder"] == 2 * 275_904
    assert assumes(found, "text_encoder", "only a pickle", "276k")
    (tmp_path / "vae" / "diffusion_pytorch_model.safetensors").unlink()
    assert "vae" in refused(1, "from-file", path)


def test_a_variant_of_a_pipeline(tmp_path: Path) -> None:
    path = pipeline(tmp_path)
    write(tmp_path / "transformer" / "diffusion_pytorch_model.fp16.safetensors", layers(1))
    found = answer("from-file", path, "--weights", "fp16")
    parts = {part["name"]: part["bytes"] for part in found["components"]["model_weights"]["parts"]}
    assert parts == {"transformer": 98_560, "text_encoder": 2 * 98_560, "vae": 98_560}
    assert assumes(found, "text_encoder, vae have no fp16 weights")
    assert "int3" in refused(1, "from-file", path, "--weights", "int3")


def test_a_variant_of_a_model(tmp_path: Path) -> None:
    path = folder(tmp_path, WHOLE)
    write(tmp_path / "model.fp16.safetensors", {name: ("F16", shape) for name, (_, shape) in WHOLE.items()})
    found = answer("from-file", path, "--weights", "fp16", "--mode", "inference")
    assert assumes(found, "stored F16")


def test_an_empty_index_beside_whole_weights(tmp_path: Path) -> None:
    path = folder(tmp_path, WHOLE)
    whole = answer("from-file", path, "--mode", "inference")
    write_json(tmp_path / "model.safetensors.index.json", {"metadata": {}, "weight_map": {}})
    found = answer("from-file", path, "--mode", "inference")
    assert assumes(found, "lists no tensor", "passed over")
    assert found["components"] == whole["components"]


TIMM = {
    "architecture": "vit_base_patch16_224",
    "num_classes": 1000,
    "num_features": 768,
    "pretrained_cfg": {"tag": "x"},
}


def test_a_folder_of_timm(tmp_path: Path) -> None:
    write_json(tmp_path / "config.json", TIMM)
    write(tmp_path / "model.safetensors", layers(3))
    for mode in ("inference", "training"):
        found = answer("from-file", str(tmp_path), "--mode", mode, "--gpu", "24GB")
        assert weights(found) == 3 * 98_560
        assert found["model"]["family"] == "timm"
        assert assumes(found, "vit_base_patch16_224", "only weights are counted")
    assert "--batch" in refused(2, "from-file", str(tmp_path), "--batch", "8")
    inspected = json.loads(run("inspect", str(tmp_path), "--json").stdout)
    assert inspected["parameters"]["total"] == found["model"]["parameters"]["total"]
    (tmp_path / "model.safetensors").unlink()
    assert "model.safetensors" in refused(1, "from-file", str(tmp_path))


def test_configs_of_others_are_called_so(tmp_path: Path) -> None:
    mistral = {"dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "hidden_dim": 128, "vocab_size": 100}
    path = str(write_json(tmp_path / "params.json", mistral))
    message = refused(1, "from-file", path)
    assert "params.json is a config of the original release" in message
    assert answer("from-file", path, "--generic")["model"]["parameters"]["total"] > 0
    other = str(write_json(tmp_path / "mine.json", {"model_type": "strange"}))
    assert "add them to mine.json" in refused(1, "from-file", other, "--generic")
    assert "OpenCLIP" in refused(
        1, "from-file", str(write_json(tmp_path / "o.json", {"model_cfg": 1, "preprocess_cfg": 2}))
    )


@pytest.mark.parametrize("declared", [None, "bfloat16", "float16", "float8_e4m3fn", "auto"])
def test_inspect_and_from_file_agree_on_the_dtype(tmp_path: Path, declared: str | None) -> None:
    path = folder(tmp_path, WHOLE, torch_dtype=declared)
    told = json.loads(run("inspect", path, "--json").stdout)["dtypes"]["loaded"]
    used = answer("from-file", path, "--mode", "inference")["setup"]["dtype"]
    assert {"F32": "fp32", "BF16": "bf16", "F16": "fp16"}[told] == used


def test_a_head_of_its_own_that_the_config_does_not_deny(tmp_path: Path) -> None:
    """Tied weights are written once; a head beside the embedding has values of its own, and is loaded."""
    gemma = {key: value for key, value in LLAMA.items() if key not in ("tie_word_embeddings", "architectures")}
    gemma |= {"model_type": "qwen2", "sliding_window": None}
    both = folder(tmp_path, WHOLE)
    write_json(tmp_path / "config.json", gemma | {"model_type": "gemma", "head_dim": 16})
    found = answer("from-file", both, "--mode", "inference")
    assert assumes(found, "the files hold one of its own")
    write_json(tmp_path / "config.json", gemma | {"model_type": "gemma", "head_dim": 16, "tie_word_embeddings": True})
    once = answer("from-file", both, "--mode", "inference")
    assert assumes(once, "tied, but stored twice", "counted once")
    assert found["model"]["parameters"]["total"] - once["model"]["parameters"]["total"] == 64_000
