"""Caches whose size is known: from published configs by hand, from engines' logs, from the library's own classes."""

from typing import Any

import pytest

from memcalc import InferenceSetup, ModelSpec, estimate
from memcalc.errors import UsageError

GIB = 2**30

DEEPSEEK_V3 = {"model_type": "deepseek_v3", "num_hidden_layers": 61, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
KIMI_K2 = {**DEEPSEEK_V3, "num_attention_heads": 64, "n_routed_experts": 384, "max_position_embeddings": 262144}
GEMMA3_27B = {
    "model_type": "gemma3_text",
    "hidden_size": 5376,
    "num_hidden_layers": 62,
    "num_attention_heads": 32,
    "num_key_value_heads": 16,
    "head_dim": 128,
    "intermediate_size": 21504,
    "vocab_size": 262208,
    "sliding_window": 1024,
    "sliding_window_pattern": 6,
}
GEMMA3_1B = {
    "model_type": "gemma3_text",
    "hidden_size": 1152,
    "num_hidden_layers": 26,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "intermediate_size": 6912,
    "vocab_size": 262144,
    "sliding_window": 512,
}
GPT_OSS_20B = {
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_local_experts": 32,
    "sliding_window": 128,
}
QWEN3_06B = {
    "model_type": "qwen3",
    "hidden_size": 1024,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 3072,
    "vocab_size": 151936,
}
QWEN3_NEXT = {
    "model_type": "qwen3_next",
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "full_attention_interval": 4,
}
SMALL = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 192,
    "vocab_size": 1000,
}
MAMBA = {
    "model_type": "mamba2",
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_heads": 8,
    "head_dim": 16,
    "state_size": 32,
    "n_groups": 1,
    "conv_kernel": 4,
    "expand": 2,
    "chunk_size": 32,
    "vocab_size": 100,
}


def report(config: dict[str, Any], **options: Any) -> Any:
    return estimate(ModelSpec.from_config(config), InferenceSetup(**options))


def cache(config: dict[str, Any], **options: Any) -> int:
    return int(report(config, **options).kv_cache_bytes)


KNOWN: list[tuple[dict[str, Any], dict[str, Any], float]] = [
    (DEEPSEEK_V3, {"seq_len": 32768, "engine": "vllm"}, 2.144),
    (DEEPSEEK_V3, {"seq_len": 163840, "engine": "sglang"}, 10.723),
    (KIMI_K2, {"seq_len": 262144, "engine": "vllm"}, 17.156),
    (GEMMA3_27B, {"seq_len": 131072, "engine": "vllm"}, 10.406),
    (GEMMA3_27B, {"seq_len": 131072, "engine": "llama.cpp"}, 10.6094),  # 1,024 + 512 cells in 52 of 62 layers
    (GEMMA3_27B, {"seq_len": 131072, "engine": "tgi"}, 62.0),
    (GPT_OSS_20B, {"seq_len": 8192, "batch": 32, "engine": "vllm"}, 6.094),
    (GPT_OSS_20B, {"seq_len": 8192, "batch": 32}, 6.093),
    (GPT_OSS_20B, {"seq_len": 8192, "batch": 32, "engine": "tgi"}, 12.0),
    (QWEN3_06B, {"seq_len": 40960, "engine": "vllm"}, 4.375),
]


@pytest.mark.parametrize(("config", "options", "gib"), KNOWN)
def test_known(config: dict[str, Any], options: dict[str, Any], gib: float) -> None:
    assert cache(config, **options) / GIB == pytest.approx(gib, abs=6e-4)


def test_linear_attention_keeps_nothing_per_token() -> None:
    assert cache(QWEN3_NEXT, seq_len=262144, engine="vllm") / GIB == pytest.approx(6.0, abs=1e-3)


def test_few_global_layers() -> None:
    """4 of 26 layers see everything, the others 512 tokens."""
    expected = (4 * 32768 + 22 * 512) * 2 * 256 * 2
    assert cache(GEMMA3_1B, seq_len=32768, engine="vllm") == expected
    assert expected / 2**20 == pytest.approx(139, abs=0.5)


def test_the_library_keeps_the_latent_and_expands_it_at_every_call() -> None:
    """Transformers 5 caches what vLLM does (measured rows), but its decode holds the expanded heads for a moment."""
    ours, engine = (report(DEEPSEEK_V3, seq_len=32768, engine=name) for name in ("transformers", "vllm"))
    assert ours.kv_cache_bytes == engine.kv_cache_bytes
    expanded = 32768 * 128 * (128 + 64 + 128) * 2
    assert ours.phases.decode.peak_bytes - engine.phases.decode.peak_bytes > expanded


@pytest.mark.parametrize(
    ("engine", "kv_dtype", "bits"),
    [
        ("transformers", "bf16", 16),
        ("transformers", "fp8", 8),
        ("transformers", "int8", 8.5),
        ("transformers", "int4", 4.5),
        ("vllm", "fp8", 8),
        ("vllm", "auto", 16),
        ("llama.cpp", "auto", 16),
        ("llama.cpp", "fp32", 32),
        ("llama.cpp", "int8", 8.5),
        ("llama.cpp", "int4", 4.5),
    ],
)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_dtypes_of_the_cache(engine: str, kv_dtype: str, bits: float, dtype: str) -> None:
    """Groups of 64 share scale and zero in the library, blocks of 32 a scale in ggml, whatever the weights' dtype."""
    if dtype == "fp32" and engine != "llama.cpp" and kv_dtype in ("auto", "bf16"):
        bits = 32
        kv_dtype = "auto"
    elements = 3 * 2 * 2 * 16 * 256 * 2
    assert cache(SMALL, batch=2, engine=engine, kv_dtype=kv_dtype, dtype=dtype) == elements * bits / 8


@pytest.mark.parametrize(
    ("engine", "kv_dtype", "dtype"),
    [
        ("vllm", "int4", "bf16"),
        ("transformers", "fp16", "bf16"),
        ("transformers-static", "fp8", "bf16"),
        ("tgi", "int8", "fp16"),
    ],
)
def test_a_dtype_that_an_engine_lacks(engine: Any, kv_dtype: Any, dtype: Any) -> None:
    with pytest.raises(UsageError, match=rf"{engine} has no {kv_dtype} cache; it offers auto"):
        report(SMALL, engine=engine, kv_dtype=kv_dtype, dtype=dtype)


def test_the_library_quantizes_no_windows() -> None:
    with pytest.raises(UsageError, match="sliding window"):
        report(GEMMA3_1B, kv_dtype="int4")


@pytest.mark.parametrize("engine", ["transformers", "vllm", "transformers-static"])
def test_beams_multiply_the_cache(engine: Any) -> None:
    assert cache(SMALL, num_beams=4, engine=engine) == 4 * cache(SMALL, engine=engine)
    assert cache(SMALL, num_beams=4, batch=2, engine=engine) == cache(SMALL, batch=8, engine=engine)


def test_beams_are_picked_by_copies() -> None:
    plain, beams = report(SMALL, batch=4, seq_len=4096), report(SMALL, num_beams=4, seq_len=4096)
    one_tensor = 4 * 2 * 16 * 4096 * 2
    assert beams.phases.prefill == plain.phases.prefill
    assert 0 <= beams.phases.decode.peak_bytes - plain.phases.decode.peak_bytes <= 2 * one_tensor


@pytest.mark.parametrize("engine", ["transformers", "vllm"])
def test_chunks_bound_the_activations_of_prefill(engine: Any) -> None:
    options = {"seq_len": 8192, "engine": engine, "attention": "flash"}
    whole, chunked = (report(SMALL, **options, prefill_chunk_size=chunk) for chunk in (8192, 512))
    assert chunked.kv_cache_bytes == whole.kv_cache_bytes
    assert chunked.phases.decode == whole.phases.decode
    assert chunked.phases.prefill.peak_bytes < whole.phases.prefill.peak_bytes - 10 * 2**20


def test_pages_are_taken_whole() -> None:
    assert cache(SMALL, seq_len=1, engine="vllm") == cache(SMALL, seq_len=16, engine="vllm")
    assert cache(SMALL, seq_len=17, engine="vllm") == cache(SMALL, seq_len=32, engine="vllm")
    assert cache(SMALL, seq_len=17, engine="sglang") < cache(SMALL, seq_len=18, engine="sglang")


def test_a_static_cache_stands_for_all_tokens() -> None:
    report_ = report(SMALL, seq_len=200, max_new_tokens=57, engine="transformers-static")
    assert report_.kv_cache_bytes == cache(SMALL, seq_len=256)
    growing = report(SMALL, seq_len=200, max_new_tokens=57)
    assert growing.kv_cache_bytes == report_.kv_cache_bytes
    assert growing.phases.prefill.peak_bytes < report_.phases.prefill.peak_bytes


def test_states_are_of_fixed_size_and_stand_beside_the_cache() -> None:
    """A recurrent model keeps its convolution's inputs and its state for each sequence, nothing per token."""
    short, long = (report(MAMBA, seq_len=length, engine="vllm", batch=5) for length in (64, 4096))
    assert (short.kv_cache_bytes, long.kv_cache_bytes) == (0, 0)
    sizes = [{part.name: part.bytes for part in r.components.other_overhead.parts} for r in (short, long)]
    convolution = (128 + 2 * 32) * 4 * 2
    state = 8 * 16 * 32 * 4
    assert sizes[0]["recurrent states"] in (5 * 3 * (convolution + state), 5 * 3 * (convolution + state // 2))
    assert sizes[0]["recurrent states"] == sizes[1]["recurrent states"]
