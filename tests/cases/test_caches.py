"""What people were told wrong about caches and serving, with the right numbers: engines' logs and public configs."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.cli_runs import refused, run
from support.reports import lines
from support.shapes import decoder

from memcalc import Gpu, InferenceSetup, ModelSpec, estimate, find_gpu
from memcalc.errors import ConfigError

GIB = 2**30


LLAMA_7B = decoder(4096, 32, 32, 32, 11008, 32000)
LLAMA_13B = decoder(5120, 40, 40, 40, 13824, 32000)
LLAMA_70B = decoder(8192, 80, 64, 8, 28672, 32000)
LLAMA3_8B = decoder(4096, 32, 32, 8, 14336, 128256)
SMOLLM2_360M = decoder(960, 32, 15, 5, 2560, 49152, tie_word_embeddings=True)
QWEN25_7B = decoder(3584, 28, 28, 4, 18944, 152064, model_type="qwen2")
QWEN3_235B = decoder(
    4096, 94, 64, 4, 12288, 151936, model_type="qwen3_moe", head_dim=128, moe_intermediate_size=1536, num_experts=128
)
GPT_OSS_120B = {
    "model_type": "gpt_oss",
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "sliding_window": 128,
    "num_local_experts": 128,
}
MIXTRAL = decoder(4096, 32, 32, 8, 14336, 32000, model_type="mixtral", num_local_experts=8)
GLM4_9B = {
    "model_type": "chatglm",
    "num_layers": 40,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "kv_channels": 128,
    "multi_query_attention": True,
    "multi_query_group_num": 2,
    "ffn_hidden_size": 13696,
    "padded_vocab_size": 151552,
    "add_qkv_bias": True,
    "add_bias_linear": False,
    "torch_dtype": "bfloat16",
    "seq_length": 131072,
}
T5 = {
    "model_type": "t5",
    "d_model": 64,
    "d_kv": 16,
    "d_ff": 128,
    "num_heads": 8,
    "num_layers": 3,
    "vocab_size": 100,
    "is_encoder_decoder": True,
}


def hybrid(layers: int, attending: int, kv_heads: int, head_dim: int) -> dict[str, Any]:
    """A model of which only some layers attend; the others are recurrent."""
    return {
        "model_type": "bamba",
        "num_hidden_layers": layers,
        "hidden_size": 2048,
        "num_attention_heads": 8,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": 512,
        "vocab_size": 1000,
        "attn_layer_indices": list(range(0, layers, layers // attending))[:attending],
        "mamba_n_heads": 64,
    }


def report(config: dict[str, Any], gpu: Gpu | str | None = None, **options: Any) -> Any:
    return estimate(
        ModelSpec.from_config(config), InferenceSetup(**options), find_gpu(gpu) if isinstance(gpu, str) else gpu
    )


def cache(config: dict[str, Any], **options: Any) -> int:
    return int(report(config, **options).kv_cache_bytes)


def weights(config: dict[str, Any], **options: Any) -> int:
    return int(report(config, **options).components.model_weights.peak_bytes)


def test_weights_and_share_of_an_engine_s_profile() -> None:
    """An 8B model on an 80 GB card: weights 14.96 GiB, half of it on each of two; 0.9 of 79.22 GiB is used."""
    assert weights(LLAMA3_8B, engine="vllm") / GIB == pytest.approx(14.96, abs=0.01)
    assert weights(LLAMA3_8B, engine="vllm", tensor_parallel_size=2) / GIB == pytest.approx(7.48, abs=0.01)
    found = report(LLAMA3_8B, "79.22GiB", engine="vllm", engine_version="0.6.5")
    assert found.serving.pool.budget_bytes / GIB == pytest.approx(71.29, abs=0.01)
    assert cache(LLAMA3_8B, seq_len=4096, engine="vllm") == 4096 * 128 * 1024


@pytest.mark.parametrize(("gpus", "tokens"), [(1, 53.29 * GIB / (128 * 1024)), (2, 58.97 * GIB / (64 * 1024))])
def test_tokens_that_an_engine_s_profile_leaves(gpus: int, tokens: float) -> None:
    """What is left of 71.29 GiB beside weights, 1.26 GiB of activations and what is outside PyTorch."""
    gpu = replace(find_gpu("H100-80GB"), usable_bytes=int(79.22 * GIB))
    found = report(LLAMA3_8B, gpu, engine="vllm", engine_version="0.6.5", seq_len=1024, tensor_parallel_size=gpus)
    assert found.serving.pool.activations_bytes / GIB == pytest.approx(1.26, rel=0.06)
    assert found.serving.pool.pool_tokens == pytest.approx(tokens, rel=0.04)
    assert any("communication" in line for line in lines(found)) == (gpus > 1)


@pytest.mark.parametrize(("engine", "tokens", "gib"), [("sglang", 367404, 2 * 8.234), ("vllm", 178880, 8.02)])
def test_two_engines_log_the_same_bytes_per_token(engine: str, tokens: int, gib: float) -> None:
    """Four key-value heads on four GPUs: one each."""
    assert cache(QWEN3_235B, seq_len=tokens, engine=engine, tensor_parallel_size=4) / GIB == pytest.approx(
        gib, abs=0.005
    )


def test_preallocation_for_a_batch() -> None:
    """Batch 8 of 4,096 tokens: 512 MiB a layer, 16 GiB in all, on top of the weights."""
    assert cache(LLAMA_7B, batch=8, seq_len=4096, dtype="fp16") == 32 * 512 * 2**20
    found = report(LLAMA_7B, "44.35GiB", batch=8, seq_len=4096, dtype="fp16", engine="transformers-static")
    assert found.phases.prefill.peak_bytes > 28 * GIB


def test_a_token_budget_that_cannot_fit() -> None:
    found = report(LLAMA_13B, "A100-80GB", seq_len=120_000, dtype="fp16", engine="sglang")
    assert found.kv_cache_bytes / GIB == pytest.approx(91.6, abs=0.1)
    assert found.kv_cache_bytes / 80 / GIB == pytest.approx(1.144, abs=0.001)
    assert not found.gpu.fits
    assert report(LLAMA_13B, "A100-80GB", seq_len=6_000, dtype="fp16", engine="sglang").gpu.fits


def test_a_cache_in_fp32_and_layers_without_one() -> None:
    """K and V of 355 MiB each on ten of forty layers; of 160 MiB each on 32."""
    mixed = hybrid(40, 10, 2, 256)
    assert cache(mixed, seq_len=18176, engine="llama.cpp", kv_dtype="fp32") == 2 * 355 * 2**20
    assert cache(SMOLLM2_360M, seq_len=4096, engine="llama.cpp", kv_dtype="fp32") == 2 * 160 * 2**20
    parts = [
        {part.name: part.bytes for part in report(mixed, seq_len=n, engine="llama.cpp").components.other_overhead.parts}
        for n in (512, 18176)
    ]
    assert parts[0]["recurrent states"] == parts[1]["recurrent states"] > 0


def test_budgets_that_a_server_infers() -> None:
    assert cache(LLAMA_7B, seq_len=16224, dtype="fp16", engine="tgi") / GIB == pytest.approx(7.92, abs=0.005)
    assert weights(LLAMA_7B, dtype="fp16") / GIB == pytest.approx(12.55, abs=0.005)
    found = report(LLAMA_70B, seq_len=406560, dtype="fp16", engine="tgi", tensor_parallel_size=4)
    assert found.kv_cache_bytes / GIB == pytest.approx(31.0, abs=0.05)
    assert found.components.model_weights.peak_bytes / GIB == pytest.approx(32.1, abs=0.05)


def test_layers_with_a_window_are_neither_left_out_nor_kept_in_full_everywhere() -> None:
    """Full pages: 73,728 bytes a token (5.38 GiB for 78,384); leaving window layers out would halve it."""
    tokens = 78_384
    full, capped = (cache(GPT_OSS_120B, seq_len=tokens, engine=engine) for engine in ("tgi", "vllm"))
    assert full == 73_728 * tokens
    assert full / GIB == pytest.approx(5.38, abs=0.005)
    assert 36_864 * tokens < capped < 36_864 * tokens + 18 * 2048 * 256


def test_only_layers_that_attend_have_a_cache() -> None:
    """Of 64 layers every fourth attends (`full_attention_interval`), so 16 count, whatever the others are."""
    qwen = {
        "model_type": "qwen3_5_text",
        "num_hidden_layers": 64,
        "hidden_size": 512,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "full_attention_interval": 4,
        "intermediate_size": 1024,
        "vocab_size": 1000,
    }
    assert cache(qwen, seq_len=262144, engine="vllm") == 16 * GIB
    assert cache(hybrid(64, 16, 4, 256), seq_len=262144, engine="vllm") == 16 * GIB


def test_a_quantized_cache_beside_quantized_weights() -> None:
    """262,144 tokens: 7.44 GiB in blocks of 34 bytes for 32, against 14 GiB in fp16."""
    assert cache(QWEN25_7B, seq_len=262144, engine="llama.cpp", kv_dtype="int8") / GIB == pytest.approx(7.44, abs=0.005)
    assert cache(QWEN25_7B, seq_len=262144, engine="llama.cpp") == 14 * GIB


def test_the_default_length_is_modest_and_said() -> None:
    """How long a model can read is a capability, not a workload."""
    found = report({**LLAMA3_8B, "max_position_embeddings": 262144})
    assert found.setup["seq_len"] == 256
    assert any("sequence length 256 (default; --seq-len)" in line for line in lines(found))


@pytest.mark.parametrize(
    ("config", "per_token"),
    [
        (LLAMA3_8B, 131_072),
        (MIXTRAL, 131_072),
        (GLM4_9B, 40_960),
        ({**GLM4_9B, "multi_query_attention": False}, 655_360),
        (
            {
                "model_type": "falcon",
                "hidden_size": 4544,
                "num_attention_heads": 71,
                "num_hidden_layers": 32,
                "multi_query": True,
                "new_decoder_architecture": False,
            },
            8_192,
        ),
    ],
    ids=["grouped", "experts", "groups named otherwise", "groups switched off", "one head for all"],
)
def test_bytes_per_token(config: dict[str, Any], per_token: int) -> None:
    assert cache(config, seq_len=1024) == 1024 * per_token


def test_heads_that_the_library_repeats_are_kept_once_by_engines() -> None:
    """An old config of the 40B: 128 query heads over 8. Transformers caches all 128."""
    config = {"model_type": "RefinedWeb", "hidden_size": 8192, "n_head": 128, "n_head_kv": 8, "n_layer": 60}
    assert report(config).model.parameters.total == 41_303_293_952
    assert cache(config, seq_len=1024, engine="vllm") == 1024 * 60 * 2 * 8 * 64 * 2
    assert cache(config, seq_len=1024) == 16 * cache(config, seq_len=1024, engine="vllm")


WINDOWS: list[tuple[dict[str, Any], int, int]] = [
    (
        {
            "model_type": "qwen2",
            "num_hidden_layers": 28,
            "sliding_window": 4096,
            "use_sliding_window": False,
            "max_window_layers": 28,
        },
        28,
        0,
    ),
    ({"model_type": "qwen3", "num_hidden_layers": 6, "sliding_window": 2048}, 6, 0),
    ({"model_type": "mistral", "num_hidden_layers": 32, "sliding_window": 4096}, 0, 32),
    ({"model_type": "mistral", "num_hidden_layers": 32, "sliding_window": None}, 32, 0),
    (
        {
            "model_type": "gemma3_text",
            "num_hidden_layers": 6,
            "sliding_window": 512,
            "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
        },
        1,
        5,
    ),
]


@pytest.mark.parametrize(("config", "full", "windowed"), WINDOWS, ids=lambda value: str(value)[:40])
def test_a_window_counts_only_where_it_is_switched_on(config: dict[str, Any], full: int, windowed: int) -> None:
    shape = {
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 128,
        "vocab_size": 100,
    }
    tokens, window = 8192, config["sliding_window"] or 0
    expected = (full * tokens + windowed * window) * 2 * 2 * 16 * 2
    assert cache({**shape, **config}, seq_len=tokens, engine="vllm") == expected


NEMOTRON = {
    "model_type": "nemotron_h",
    "hidden_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 100,
    "intermediate_size": 512,
    "mamba_num_heads": 16,
    "mamba_head_dim": 32,
    "ssm_state_size": 16,
    "n_groups": 2,
}
QWEN3_NEXT = {
    "model_type": "qwen3_next",
    "hidden_size": 256,
    "num_hidden_layers": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 100,
    "full_attention_interval": 4,
    "num_experts": 16,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "linear_num_value_heads": 8,
    "linear_num_key_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}


@pytest.mark.parametrize(
    ("config", "attending"),
    [
        ({**NEMOTRON, "hybrid_override_pattern": "M-M-M-M*-M-M*-", "num_hidden_layers": 14}, 2),
        ({**NEMOTRON, "layers_block_type": ["mamba", "attention", "mlp", "moe"], "num_hidden_layers": 4}, 1),
        (QWEN3_NEXT, 16),
    ],
    ids=["letters", "names", "every fourth"],
)
def test_attention_layers_are_counted_in_a_pattern(config: dict[str, Any], attending: int) -> None:
    """Layers that do not attend (recurrent ones, MLPs, experts) have no keys and values."""
    assert cache(config, seq_len=1024, engine="vllm") == 1024 * attending * 2 * 2 * 32 * 2


def test_an_unknown_letter_in_a_pattern_is_named() -> None:
    with pytest.raises(ConfigError, match="hybrid_override_pattern"):
        cache({**NEMOTRON, "hybrid_override_pattern": "M-X", "num_hidden_layers": 3})


def test_a_decoder_s_own_cache_grows_and_the_source_s_does_not() -> None:
    """Heads of 16 in a model of 64: an inner width of 128. Twice three layers, source and target."""
    per_token = 3 * 2 * 8 * 16 * 2
    assert cache(T5, seq_len=300) == per_token * (300 + 1)
    assert cache(T5, seq_len=300, max_new_tokens=40) == per_token * (300 + 40)
    assert cache(T5, seq_len=300, max_new_tokens=40, num_beams=4) == 4 * per_token * (300 + 40)


@pytest.mark.parametrize("key", ["num_kv_shared_layers", "kv_source_layer_ids"])
def test_layers_that_would_share_a_cache_are_not_overlooked(tmp_path: Path, key: str) -> None:
    """A family whose every layer has keys and values of its own is refused a config that says otherwise."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(decoder(64, 4, 4, 2, 128, 100) | {key: 2 if "num" in key else [0, 2]}))
    message = refused(1, "from-file", str(path), "--mode", "inference")
    assert key in message
    assert "share their keys and values" in message
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_type": "unheard-of", "index_n_heads": 4}))
    assert "--generic" in refused(1, "from-file", str(path))
    message = refused(1, "from-file", str(path), "--generic", "--mode", "inference")
    assert key in message
    assert "index_n_heads" in message
    asked = ("--generic", "--generic-ignore", f"{key},index_n_heads", "--mode", "inference", "--json")
    found = json.loads(run("from-file", str(path), *asked).stdout)
    (line,) = (line for line in lines(found) if "low confidence" in line)
    assert key in line
    assert "index_n_heads" in line
