"""Quantized repositories as people met them: what stays wide, what the cache is, and what can be trained on."""

from pathlib import Path
from typing import Any

import pytest
from support.cli_runs import answer, assumes, refused
from support.shapes import decoder
from support.weights import write_json

GIB = 2**30

LLAMA3_8B = decoder(4096, 32, 32, 8, 14336, 128256, tie_word_embeddings=False)
NVFP4 = {
    "quant_method": "modelopt",
    "quant_algo": "NVFP4",
    "config_groups": {
        "group_0": {"weights": {"num_bits": 4, "type": "float", "group_size": 16}, "targets": ["Linear"]}
    },
    "ignore": ["lm_head", *(f"model.layers.{layer}.self_attn*" for layer in range(32))],
}
GPT_OSS = {
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "intermediate_size": 2880,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "vocab_size": 201088,
    "quantization_config": {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
    },
}


def parts(found: dict[str, Any]) -> dict[str, int]:
    return {part["name"]: part["bytes"] for part in found["components"]["model_weights"]["parts"]}


def served(folder: Path, config: dict[str, Any], *options: str) -> dict[str, Any]:
    path = write_json(folder / "config.json", config)
    return answer("from-file", str(path), "--mode", "inference", "--engine", "vllm", *options)


def test_attention_that_modelopt_leaves_wide(tmp_path: Path) -> None:
    """An 8B in NVFP4 whose exporter lists the attention of each layer by a shell pattern: 2.5 GiB of it is bf16."""
    found = parts(served(tmp_path, LLAMA3_8B | {"quantization_config": NVFP4}))
    assert found["bf16 attention"] == 32 * 2 * (2 * 4096 * 4096 + 2 * 4096 * 1024)
    assert abs(found["bf16 attention"] / GIB - 2.5) < 0.01
    assert found["modelopt NVFP4 MLP"] == 32 * 3 * 4096 * 14336 * 9 // 16


def test_an_uneven_list_splits_the_layers(tmp_path: Path) -> None:
    """Unsloth's dynamic 4-bit copies keep a few modules in 16 bits, in training too."""
    stated = {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "llm_int8_skip_modules": ["lm_head", "model.layers.0.mlp", "model.layers.7.self_attn"],
    }
    path = str(write_json(tmp_path / "a.json", LLAMA3_8B | {"quantization_config": stated}))
    even = stated | {"llm_int8_skip_modules": ["lm_head"]}
    whole = str(write_json(tmp_path / "b.json", LLAMA3_8B | {"quantization_config": even}))
    options = ("--lora-rank", "8", "--precision", "bf16", "--no-prepare-kbit-training")
    first, second = answer("from-file", path, *options), answer("from-file", whole, *options)
    kept = 3 * 4096 * 14336 + 2 * 4096 * 4096 + 2 * 4096 * 1024
    more = first["components"]["model_weights"]["peak_bytes"] - second["components"]["model_weights"]["peak_bytes"]
    assert abs(more - kept * (2 - 4.5 / 8)) < 1024 * 16  # absmax in fp32 for 64 weights; tables of quantized layers
    assert first["model"]["parameters"] == second["model"]["parameters"]
    served_first = served(tmp_path, LLAMA3_8B | {"quantization_config": stated}, "--engine", "transformers")
    assert parts(served_first)["bf16 MLP"] == 2 * 3 * 4096 * 14336


@pytest.mark.parametrize("beside", ["kv_cache_scheme", "hf_quant_config.json"])
def test_the_cache_is_as_the_checkpoint_says(tmp_path: Path, beside: str) -> None:
    """vLLM's auto turns to fp8 where the checkpoint says so: half the cache, wherever it says it."""
    config = LLAMA3_8B | {"quantization_config": NVFP4}
    if beside == "kv_cache_scheme":
        config["quantization_config"] = NVFP4 | {beside: {"num_bits": 8, "type": "float", "dynamic": False}}
    else:
        write_json(tmp_path / beside, {"quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8"}})
    found = served(tmp_path, config, "--seq-len", "131072")
    assert found["kv_cache_bytes"] == 32 * 2 * 8 * 128 * 131072
    assert found["setup"]["kv_dtype"] == "fp8"
    assert assumes(found, "KV cache in fp8", "--kv-dtype")
    assert served(tmp_path, config, "--kv-dtype", "bf16")["setup"]["kv_dtype"] == "bf16"
    other = served(tmp_path, config, "--engine", "transformers")
    assert assumes(other, "fp8 KV cache", "transformers does not follow")


def test_mxfp4_is_dequantized_for_training(tmp_path: Path) -> None:
    """LoRA of gpt-oss-20b took about 50 GB on an A100 and no 24 GB card: Transformers trains no MXFP4."""
    path = str(write_json(tmp_path / "config.json", GPT_OSS))
    options = "--lora-rank 8 --lora-targets all-linear --precision bf16 --seq-len 2048 --attention eager"
    found = answer("from-file", path, *options.split(), "--activation-checkpointing", "full", "--gpu", "RTX-4090")
    assert not found["gpu"]["fits"]
    assert 44 * GIB < found["peak"]["process_bytes"] < 50 * GIB
    assert assumes(found, "dequantized for training", "Mxfp4Config(dequantize=True)")
    assert 11.5 * GIB < sum(parts(served(tmp_path, GPT_OSS)).values()) < 13.5 * GIB
    plain = str(write_json(tmp_path / "plain.json", {k: v for k, v in GPT_OSS.items() if k != "quantization_config"}))
    assert "cannot be trained on" in refused(2, "from-file", plain, "--quantization", "mxfp4", "--lora-rank", "8")


@pytest.mark.parametrize(
    ("stated", "packed"),
    [
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, True),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, True),
        ({"quant_method": "hqq", "quant_config": {"weight_quant_params": {"nbits": 4, "group_size": 64}}}, True),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, True),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, True),
        ({"quant_method": "torchao", "quant_type": "int8_weight_only"}, True),
        ({"quant_method": "torchao", "quant_type": "int4_weight_only"}, False),
        (NVFP4, False),
        ({"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": {"num_bits": 4}}}}, False),
        ({"quant_method": "fbgemm_fp8"}, False),
        ({"quant_method": "auto-round", "bits": 4, "group_size": 128}, False),
        ({"quant_method": "bitnet"}, False),
    ],
    ids=lambda value: value["quant_method"] if isinstance(value, dict) else str(value),
)
def test_which_formats_adapters_train_on(tmp_path: Path, stated: dict[str, Any], packed: bool) -> None:
    path = str(write_json(tmp_path / "config.json", LLAMA3_8B | {"quantization_config": stated}))
    found = answer("from-file", path, "--lora-rank", "8", "--precision", "bf16")
    ratio = found["components"]["model_weights"]["peak_bytes"] / found["model"]["parameters"]["total"]
    assert (ratio < 1.6) == packed
    assert assumes(found, "trained by" if packed else "dequantized for training")


MOE = decoder(2048, 4, 32, 4, 6144, 151936, model_type="qwen3_moe", head_dim=128, moe_intermediate_size=768)
MOE |= {"num_experts": 128, "num_experts_per_tok": 8}


def test_experts_in_4_bits(tmp_path: Path) -> None:
    """Transformers 5 leaves fused experts wide; Transformers 4, Unsloth and axolotl quantize them."""
    path = str(write_json(tmp_path / "config.json", MOE))
    options = ("--quantization", "nf4", "--lora-rank", "8", "--lora-targets", "q_proj,v_proj", "--precision", "bf16")
    wide = answer("from-file", path, *options)
    apart = answer("from-file", path, *options, "--quantize-moe-experts", "one-by-one")
    stacked = answer("from-file", path, *options, "--quantize-moe-experts", "stacked")
    experts = 4 * 128 * 3 * 2048 * 768
    saved = parts(wide)["fp32 experts"] - sum(size for name, size in parts(apart).items() if "nf4" in name)
    assert parts(wide)["fp32 experts"] == 4 * (experts + 4 * 128 * 2048)  # and the routers
    assert saved > 3.3 * experts
    assert assumes(wide, "experts stay wide", "Transformers 5.24", "--quantize-moe-experts")
    assert assumes(apart, "one by one")
    assert apart["peak"]["allocated_bytes"] < stacked["peak"]["allocated_bytes"] < wide["peak"]["allocated_bytes"]
    served = answer(
        "from-file", path, "--mode", "inference", "--quantization", "nf4", "--quantize-moe-experts", "stacked"
    )
    assert parts(served)["nf4 experts"] == experts * 9 // 16
    for bad in (("--quantization", "none"), ("--quantization", "awq-4", "--lora-rank", "8")):
        assert "--quantize-moe-experts" in refused(2, "from-file", path, *bad, "--quantize-moe-experts", "stacked")
