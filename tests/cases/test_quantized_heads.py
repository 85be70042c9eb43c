"""Heads that a repository quantizes too, repositories that name no method, and engines that do not load one."""

from pathlib import Path
from typing import Any

import pytest
from support.cli_runs import answer, assumes, refused
from support.shapes import decoder
from support.weights import write_json

LLAMA = decoder(4096, 2, 32, 8, 14336, 128256, tie_word_embeddings=False)
HEAD = 4096 * 128256
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False}
NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
PACKED = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "int", "group_size": 128, "strategy": "group", "symmetric": True},
        }
    },
}


def head(folder: Path, stated: dict[str, Any], *options: str, **more: Any) -> int:
    """Bytes of the LM head in the 16 bits or in the format of `stated`."""
    path = write_json(folder / "config.json", LLAMA | more | {"quantization_config": stated})
    found = answer("from-file", str(path), "--mode", "inference", *options)
    parts = found["components"]["model_weights"]["parts"]
    return sum(int(part["bytes"]) for part in parts if part["name"].endswith(" LM head"))


@pytest.mark.parametrize(
    ("stated", "expected"),
    [
        (GPTQ, HEAD * 2),
        (GPTQ | {"lm_head": True}, HEAD // 2 + HEAD // 128 * 20 // 8 + 4096 * 4),
        (NF4, HEAD * 2),
        (NF4 | {"llm_int8_skip_modules": ["model.layers.1.mlp"]}, HEAD // 2 + HEAD // 64 * 4 + 64),
        (NF4 | {"llm_int8_skip_modules": ["lm_head"]}, HEAD * 2),
        (PACKED | {"ignore": ["lm_head"]}, HEAD * 2),
        (PACKED | {"ignore": []}, HEAD // 2 + HEAD // 128 * 2),
        ({"quant_method": "awq", "bits": 4, "group_size": 128, "modules_to_not_convert": ["layers.0"]}, HEAD * 2),
        (
            {"quant_method": "auto-round", "bits": 4, "group_size": 128, "extra_config": {"lm_head": {"bits": 8}}},
            HEAD + HEAD // 128 * 3,
        ),
    ],
)
def test_the_head_is_quantized_where_the_repository_does_it(
    tmp_path: Path, stated: dict[str, Any], expected: int
) -> None:
    """A list of wide modules replaces Transformers' own, which names the head; AWQ adds to it."""
    assert abs(head(tmp_path, stated) - expected) < 1024


def test_a_tied_head_stays_wide(tmp_path: Path) -> None:
    assert head(tmp_path, GPTQ | {"lm_head": True}, tie_word_embeddings=True) == 0


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_the_head_of_serving_engines_is_an_embedding(tmp_path: Path, engine: str) -> None:
    """Only GPTQ's and auto-round's methods quantize one there."""
    listed = NF4 | {"llm_int8_skip_modules": ["model.layers.1.mlp"]}
    assert head(tmp_path, listed, "--engine", engine) == HEAD * 2
    assert head(tmp_path, GPTQ | {"lm_head": True}, "--engine", engine) < HEAD


@pytest.mark.parametrize(
    ("stated", "engine", "words"),
    [
        ({"bits": 4, "group_size": 64}, "vllm", ("mlx", "Apple")),
        ({"quant_method": "quanto", "weights": "int8"}, "vllm", ("quanto", "--engine transformers")),
        ({"quant_method": "eetq", "weights": "int8"}, "sglang", ("eetq", "--engine transformers")),
        ({"quant_method": "bitnet"}, "vllm", ("bitnet", "--engine transformers")),
    ],
)
def test_an_engine_that_does_not_load_them(
    tmp_path: Path, stated: dict[str, Any], engine: str, words: tuple[str, ...]
) -> None:
    path = str(write_json(tmp_path / "config.json", LLAMA | {"quantization_config": stated}))
    message = refused(2, "from-file", path, "--mode", "inference", "--engine", engine)
    assert "does not load" in message
    assert all(word in message for word in words)


@pytest.mark.parametrize(
    ("stated", "method"),
    [
        ({"bits": 4, "group_size": 128, "desc_act": True, "damp_percent": 0.01}, "gptq 4-bit"),
        ({"w_bit": 4, "q_group_size": 128, "zero_point": True, "version": "GEMM"}, "awq 4-bit"),
    ],
)
def test_a_method_that_only_its_keys_tell(tmp_path: Path, stated: dict[str, Any], method: str) -> None:
    path = write_json(tmp_path / "config.json", LLAMA | {"quantization_config": stated})
    found = answer("from-file", str(path), "--mode", "inference", "--engine", "vllm")
    assert assumes(found, method)
