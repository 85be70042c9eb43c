"""What a GPU serves: tensor-parallel shares, the largest batch, the longest context; and options that cannot be."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.cli_runs import refused, run
from support.reports import lines

from memcalc import InferenceSetup, ModelSpec, estimate, find_gpu
from memcalc.errors import UsageError
from memcalc.tables import sglang

LLAMA = {
    "model_type": "llama",
    "hidden_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "intermediate_size": 2816,
    "vocab_size": 32000,
    "max_position_embeddings": 8192,
}
LATENT = {
    "model_type": "deepseek_v3",
    "hidden_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "first_k_dense_replace": 1,
    "intermediate_size": 1024,
    "moe_intermediate_size": 256,
    "n_routed_experts": 16,
    "num_experts_per_tok": 2,
    "n_group": 4,
    "topk_group": 2,
    "q_lora_rank": 128,
    "kv_lora_rank": 64,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "vocab_size": 4096,
}
MIXTURE = {
    **LLAMA,
    "model_type": "qwen3_moe",
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 512,
}
GPU = find_gpu("24GB")


def report(config: dict[str, Any], gpu: Any = None, **options: Any) -> Any:
    return estimate(ModelSpec.from_config(config), InferenceSetup(**options), gpu)


def weights(config: dict[str, Any], **options: Any) -> int:
    return int(report(config, **options).components.model_weights.peak_bytes)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("config", [LLAMA, MIXTURE], ids=["llama", "experts"])
def test_heads_that_divide(config: dict[str, Any], size: int) -> None:
    whole, share = (report(config, tensor_parallel_size=n, engine="vllm") for n in (1, size))
    assert share.kv_cache_bytes * size == whole.kv_cache_bytes
    assert weights(config, tensor_parallel_size=size) == pytest.approx(weights(config) / size, rel=0.01)
    assert any(f"tensor parallel over {size} GPUs" in line for line in lines(share))


@pytest.mark.parametrize("size", [8, 16])
def test_key_value_heads_that_are_fewer_than_gpus_are_replicated(size: int) -> None:
    whole, share = (report(LLAMA, tensor_parallel_size=n, engine="vllm") for n in (1, size))
    assert share.kv_cache_bytes * 4 == whole.kv_cache_bytes
    assert any("each GPU keeps a copy of one" in line for line in lines(share))
    assert weights(LLAMA, tensor_parallel_size=size) > weights(LLAMA) / size


@pytest.mark.parametrize("size", [2, 8])
def test_a_latent_is_kept_by_every_gpu(size: int) -> None:
    whole, share = (report(LATENT, tensor_parallel_size=n, engine="vllm") for n in (1, size))
    assert share.kv_cache_bytes == whole.kv_cache_bytes
    assert weights(LATENT) / size < weights(LATENT, tensor_parallel_size=size) < 1.5 * weights(LATENT) / size


@pytest.mark.parametrize(
    ("config", "size", "says"),
    [
        (LLAMA, 3, "does not divide the 16 attention heads"),
        (LLAMA, 32, "does not divide the 16 attention heads"),
        ({**LLAMA, "num_attention_heads": 12, "num_key_value_heads": 4, "hidden_size": 768}, 6, "4 key-value heads"),
        ({**LLAMA, "intermediate_size": 2817}, 2, "'intermediate_size' 2817"),
        ({"model_type": "gpt2", "n_embd": 64, "n_head": 4, "n_layer": 2}, 2, "does not know how the attention"),
        ({"model_type": "mamba2", "num_hidden_layers": 2}, 2, "does not know how the model"),
        ({"model_type": "t5"}, 2, "does not know how the model"),
    ],
)
def test_what_cannot_be_divided(config: dict[str, Any], size: int, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        report(config, tensor_parallel_size=size)


@pytest.mark.parametrize("engine", ["transformers", "vllm", "llama.cpp"])
@pytest.mark.parametrize("kv_dtype", ["auto", "fp8"])
def test_the_answers_are_the_last_that_fit(engine: Any, kv_dtype: Any) -> None:
    if engine == "llama.cpp" and kv_dtype == "fp8":
        kv_dtype = "int8"
    options = {"engine": engine, "kv_dtype": kv_dtype, "attention": "flash"}
    config = {**LLAMA, "max_position_embeddings": 10**8}
    found = report(config, GPU, seq_len=4096, **options).serving
    batch, context = found.largest_batch, found.longest_context
    assert report(config, GPU, seq_len=4096, batch=batch, **options).gpu.fits
    assert not report(config, GPU, seq_len=4096, batch=batch + 1, **options).gpu.fits
    assert report(config, GPU, seq_len=context, **options).gpu.fits
    assert not report(config, GPU, seq_len=context + 17, **options).gpu.fits


def test_the_context_ends_at_the_model_s_positions() -> None:
    assert report(LLAMA, GPU).serving.longest_context == 8192


def test_nothing_fits_where_the_weights_do_not() -> None:
    serving = report({**LLAMA, "num_hidden_layers": 2000}, GPU).serving
    assert (serving.largest_batch, serving.longest_context) == (0, 0)


def test_an_engine_takes_its_share_of_the_gpu_whatever_is_needed() -> None:
    """What is needed and what will be occupied are two things: a pool fills what it may."""
    assert GPU is not None
    found = report(LLAMA, GPU, engine="sglang")
    assert found.serving.engine_reserved_bytes == int(GPU.usable_bytes * sglang.defaults(GPU).mem_fraction_static)
    assert found.peak.process_bytes < found.serving.engine_reserved_bytes / 10
    half = report(LLAMA, GPU, engine="sglang", gpu_memory_utilization=0.5)
    assert half.serving.engine_reserved_bytes == GPU.usable_bytes // 2
    pooled = report(LLAMA, GPU, engine="vllm").serving  # its share, the context before it, and CUDA graphs after
    assert 0 < pooled.engine_reserved_bytes - pooled.pool.budget_bytes < 2**31
    plain = report(LLAMA, GPU)
    assert plain.serving.engine_reserved_bytes == plain.peak.process_bytes


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--kv-dtype", "int8", "--engine", "vllm"], "engine vllm has no int8 cache"),
        (["--tensor-parallel-size", "3"], "does not divide the 16 attention heads"),
        (["--tensor-parallel-size", "0"], "--tensor-parallel-size must be at least 1"),
        (["--engine", "vlm"], "did you mean 'vllm'"),
        (["--num-beams", "0"], "--num-beams must be at least 1"),
        (["--gpu-memory-utilization", "1.5"], "--gpu-memory-utilization must be at most 1"),
        (["--kv-dtype", "q8"], "--kv-dtype cannot be 'q8'"),
    ],
)
def test_options_that_cannot_be(tmp_path: Path, options: list[str], says: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    assert says in refused(2, "from-file", str(path), "--mode", "inference", *options)


def test_a_window_for_a_model_that_has_none(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    for config, says in ((LLAMA, "llama has no sliding window"), (LATENT, "deepseek_v3 has no sliding window")):
        path.write_text(json.dumps({**config, "sliding_window": 4096}))
        assert says in refused(1, "from-file", str(path), "--mode", "inference")
        path.write_text(json.dumps({**config, "sliding_window": None}))
        run("from-file", str(path), "--mode", "inference")


def test_the_line_of_the_box(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    text = run("from-file", str(path), "--mode", "inference", "--gpu", "24GB", "--engine", "vllm").stdout
    assert "SERVES" in text
    assert "or one of 8,192" in text
    assert "vllm reserves 23.1 GiB (92% of the GPU" in text


def test_what_is_too_short_to_run_decides_nothing() -> None:
    """An image takes 16 tokens, so the search for the longest context meets sequences that cannot hold it."""
    tower = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 32, "patch_size": 8}
    text = {**LLAMA, "num_hidden_layers": 2}
    config = {"model_type": "llava", "text_config": text, "vision_config": {"model_type": "clip_vision_model", **tower}}
    assert report(config, GPU).serving.longest_context > 16
    assert report({**config, "text_config": {**text, "num_hidden_layers": 2000}}, GPU).serving.longest_context == 0


def test_what_does_not_fit_is_said_in_words(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**LLAMA, "num_hidden_layers": 2000}))
    text = run("from-file", str(path), "--mode", "inference", "--gpu", "24GB").stdout
    assert "SERVES   no sequence of 256 tokens, nor a shorter one" in text


def test_griffin_whose_recurrence_is_narrower_than_the_model() -> None:
    """Its convolution's state is as wide as the recurrence once a prompt was read, whatever the engine."""
    config = {
        "model_type": "recurrent_gemma",
        "vocab_size": 70,
        "hidden_size": 256,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_hidden_layers": 4,
        "lru_width": 192,
    }
    for engine in ("transformers", "vllm", "sglang"):
        assert report(config, GPU, engine=engine, batch=70, seq_len=300).kv_cache_bytes
    with pytest.raises(UsageError, match="lru_width"):
        report(config, seq_len=1)


@pytest.mark.parametrize(
    ("gpu", "gpus", "share"), [("H100-80GB", 1, 0.835), ("RTX-4090", 1, 0.847), ("L40S", 4, 0.837)]
)
def test_sglang_s_share_by_gpu(gpu: str, gpus: int, share: float) -> None:
    """What stays free: metadata, activations of a pass, CUDA graphs, an eighth of a GiB for each GPU."""
    assert sglang.defaults(find_gpu(gpu), gpus).mem_fraction_static == pytest.approx(share, abs=0.002)
