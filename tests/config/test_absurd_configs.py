"""Values that no config can mean: each is refused by its key, in JSON's words, or said where nobody misses it."""

from pathlib import Path
from typing import Any

import pytest
from support.cli_runs import answer, assumes, refused, run
from support.gguf_files import gguf, llama_gguf
from support.reports import lines
from support.weights import layers, write, write_json

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 192,
    "vocab_size": 1000,
}
EMBEDDING = {"model.embed_tokens.weight": ("BF16", (1000, 64)), "model.norm.weight": ("BF16", (64,))}


def config(path: Path, **values: Any) -> str:
    return str(write_json(path / "config.json", {**LLAMA, **values}).parent)


@pytest.mark.parametrize(
    ("stated", "key"),
    [
        ({"quant_method": "gptq", "bits": 10**30}, "bits"),
        ({"quant_method": "gptq", "bits": 37}, "bits"),
        ({"quant_method": "gptq", "bits": True}, "'bits' in 'quantization_config' as true"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "group_size"),
        ({"quant_method": "gptq", "bits": 4, "group_size": "x"}, "group_size"),
        ({"quant_method": "gptq", "bits": 4, "group_size": -2}, "group_size"),
        ({"quant_method": "awq", "w_bit": 4, "q_group_size": 10**30}, "q_group_size"),
        ({"quant_method": "fp8", "weight_block_size": [0, 0]}, "weight_block_size"),
        ({"quant_method": "fp8", "weight_block_size": "x"}, "weight_block_size"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": "yes"}, "load_in_4bit"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": True}, "exclude each other"),
        ({"quant_method": ""}, "quant_method"),
        ({"quant_method": 5}, "quant_method"),
        ({"quant_method": "nonsense"}, "nonsense"),
        ({"bits": 4}, "quant_method"),
        ({"quant_method": "mxfp4"}, "stacked experts"),
        ({"quant_method": "compressed-tensors", "config_groups": []}, "config_groups"),
        ({"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": {"num_bits": 10**12}}}}, "num_bits"),
        ({"quant_method": "hqq", "quant_config": {"weight_quant_params": {"nbits": "a"}}}, "nbits"),
        ({"quant_method": "compressed-tensors", "config_groups": {}, "ignore": ["re:(a+)+b"]}, "for ever"),
    ],
)
def test_quantizations_that_cannot_be(tmp_path: Path, stated: dict[str, Any], key: str) -> None:
    said = refused(1, "from-file", config(tmp_path, quantization_config=stated), "--mode", "inference")
    assert key in said
    assert "--quantization" not in said  # nobody typed it


@pytest.mark.parametrize(
    "stated",
    [
        {},
        {"quant_method": None},
        {"quant_method": "gptq", "bits": 4, "group_size": -1},
        {"quant_method": "gptq", "bits": "4", "group_size": None},
        {"quant_method": "fp8", "weight_block_size": None},
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False},
    ],
)
def test_quantizations_that_can_be(tmp_path: Path, stated: dict[str, Any]) -> None:
    run("from-file", config(tmp_path, quantization_config=stated), "--mode", "inference")


@pytest.mark.parametrize(
    ("key", "value", "word"),
    [
        ("max_position_embeddings", -5, "-5"),
        ("max_position_embeddings", 0, "0"),
        ("max_position_embeddings", "many", "'many'"),
        ("max_position_embeddings", 1e30, "1000000000000000019884624838656"),
        ("vocab_size", True, "true"),
        ("hidden_size", float("nan"), "NaN"),
        ("hidden_size", float("-inf"), "-Infinity"),
        ("hidden_size", [None, True], "[null, true]"),
        ("rope_scaling", {"type": 3}, "3"),
    ],
)
def test_keys_in_json_s_words(tmp_path: Path, key: str, value: object, word: str) -> None:
    said = refused(1, "from-file", config(tmp_path, **{key: value}), "--mode", "inference", "--gpu", "A100-80GB")
    assert word in said
    assert "True" not in said


def test_a_dtype_that_is_none_is_said(tmp_path: Path) -> None:
    assert assumes(answer("from-file", config(tmp_path, torch_dtype=5), "--mode", "inference"), "'5'")


def test_weights_of_another_family(tmp_path: Path) -> None:
    bert = {**LLAMA, "model_type": "bert"}
    write_json(tmp_path / "config.json", bert)
    write(tmp_path / "model.safetensors", {**layers(3), **EMBEDDING})
    said = refused(1, "from-file", str(tmp_path))
    assert "model.safetensors" in said
    assert "weights of another model" in said
    assert "bert" in said


def test_layers_that_the_config_lacks(tmp_path: Path) -> None:
    path = config(tmp_path, num_hidden_layers=3)
    write(tmp_path / "model.safetensors", {**layers(12), **EMBEDDING})
    assert assumes(answer("from-file", path), "12 layers", "the config builds 3", "right config")


def test_layers_that_the_files_lack(tmp_path: Path) -> None:
    path = config(tmp_path, num_hidden_layers=40)
    write(tmp_path / "model.safetensors", {**layers(3), **EMBEDDING})
    found = answer("from-file", path)
    assert assumes(found, "3 layers, the config builds 40")
    assert len(lines(found)) < 20


def test_a_gguf_is_called_by_its_own_name(tmp_path: Path) -> None:
    for change, word in (
        ({"llama.block_count": 0}, "llama.block_count"),
        ({"llama.attention.head_count": 7}, "num_attention_heads"),
        ({"llama.embedding_length": -1.5}, "llama.embedding_length"),
    ):
        tensors, metadata = llama_gguf()
        start, size = gguf(tensors, {**metadata, **change})
        path = tmp_path / "m.gguf"
        path.write_bytes(start + bytes(size - len(start)))
        said = refused(1, "from-file", str(path))
        assert word in said
        assert "m.gguf" in said
        assert "config.json" not in said


def test_a_gguf_without_sizes(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf({}, {"general.architecture": "llama"})[0])
    assert "llama.block_count" in refused(1, "from-file", str(path))
    path.write_bytes(gguf({}, llama_gguf()[1])[0])
    assert "no tensors" in refused(1, "from-file", str(path))


def test_a_config_is_called_by_its_own_name(tmp_path: Path) -> None:
    path = write_json(tmp_path / "mine.json", {**LLAMA, "hidden_size": -1})
    said = refused(1, "from-file", str(path))
    assert "mine.json gives" in said
    assert "config.json" not in said


def test_modules_to_save_that_are_none() -> None:
    found = answer("estimate", "--params", "1B", "--lora-rank", "8", "--modules-to-save", "lm_head,foo")
    assert assumes(found, "foo", "--modules-to-save")
