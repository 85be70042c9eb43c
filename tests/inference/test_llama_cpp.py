"""llama.cpp's buffers: as a build of 2026 printed them for models of many shapes, and as published logs have them."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.cli_runs import answer, refused
from support.gguf_files import gguf, llama_gguf

from memcalc import InferenceSetup, ModelSpec, estimate
from memcalc.errors import UsageError
from memcalc.inference.llama_cpp.buffers import Buffers, buffers
from memcalc.inference.served_model import served_model

MIB = 2**20
ROWS = [
    json.loads(line) for line in (Path(__file__).parents[1] / "data/llama_cpp_buffers.jsonl").read_text().splitlines()
]
"""Files of zeros of these shapes, loaded by llama.cpp (cyllama 0.2.18) on a software Vulkan GPU: what it prints."""

LLAMA3_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
}
LLAMA2_7B = {**LLAMA3_8B, "num_key_value_heads": 32, "intermediate_size": 11008, "vocab_size": 32000}
GEMMA2_2B = {
    "model_type": "gemma2",
    "hidden_size": 2304,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "intermediate_size": 9216,
    "vocab_size": 256000,
    "sliding_window": 4096,
}
GPT_OSS_20B = {
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
    "sliding_window": 128,
}
BGE_SMALL = {
    "model_type": "bert",
    "hidden_size": 384,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 1536,
    "vocab_size": 30522,
}


def buffers_of(config: dict[str, Any], length: int, *, encoder: bool = False, **options: Any) -> Buffers:
    spec, setup = ModelSpec.from_config(config), InferenceSetup(engine="llama.cpp", dtype="fp16", **options)
    return buffers(spec, setup, served_model(spec, setup), length, encoder=encoder)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['config']['model_type']} {list(row['options'].values())}")
def test_what_it_prints(row: dict[str, Any]) -> None:
    options, printed = dict(row["options"]), row["mib"]
    length = options.pop("n_ctx") // options["slots"]
    given = {"batch": options.pop("slots"), **{k: v for k, v in options.items() if v is not None}}
    found = buffers_of(row["config"], length, **given)
    assert sum(found.weights.values()) / MIB == pytest.approx(printed["model"], rel=1e-3, abs=0.01)
    assert found.cache / MIB == pytest.approx(printed["cache"], rel=1e-3)
    assert found.host_cache / MIB == pytest.approx(printed["host_cache"], rel=1e-3)
    partly = options["n_gpu_layers"] is not None and "num_experts" in row["config"]  # its copies of experts vary
    assert found.compute / MIB == pytest.approx(printed["compute"], rel=0.13 if partly else 0.06)
    assert found.host_compute / MIB == pytest.approx(printed["host_compute"], rel=0.01, abs=1.01)


@pytest.mark.parametrize(
    ("config", "length", "options", "compute", "cache"),
    [
        (LLAMA3_8B, 512, {"flash_attn": "off"}, 258.5, 64),
        (LLAMA3_8B, 131072, {"flash_attn": "off"}, 8480.0, 16384),
        (LLAMA2_7B, 2048, {"flash_attn": "off"}, 164.01, 1024),
        (LLAMA2_7B, 4096, {"flash_attn": "off"}, 296.01, 2048),
        (GEMMA2_2B, 8192, {"swa_full": True}, 509.0, 832),
        (GPT_OSS_20B, 131072, {}, 420.08, 3090),
        (GPT_OSS_20B, 131072, {"ubatch_size": 2048}, 1672.08, 3126),
    ],
)
def test_published_logs(
    config: dict[str, Any], length: int, options: dict[str, Any], compute: float, cache: float
) -> None:
    """Logs of 2024 to 2026 in public repositories, on NVIDIA, Apple and CPU backends."""
    found = buffers_of(config, length, **options)
    assert found.compute / MIB == pytest.approx(compute, rel=0.035)
    assert found.cache / MIB == pytest.approx(cache, rel=1e-3)


def test_encoders_are_read_in_one_ubatch() -> None:
    """bge-small: 16.75 MiB in a log."""
    found = buffers_of(BGE_SMALL, 512, encoder=True, flash_attn="off")
    assert found.compute / MIB == pytest.approx(16.75, rel=0.06)
    assert found.cache == 0
    with pytest.raises(UsageError, match="one ubatch"):
        buffers_of(BGE_SMALL, 512, encoder=True, ubatch_size=256)


def test_what_lies_on_the_host_is_not_on_the_gpu() -> None:
    whole, part = buffers_of(LLAMA2_7B, 4096), buffers_of(LLAMA2_7B, 4096, n_gpu_layers=17)
    assert part.cache + part.host_cache == whole.cache
    assert part.cache == whole.cache // 2
    assert part.host_weights > whole.host_weights == 32000 * 4096 * 2
    none = buffers_of(LLAMA2_7B, 4096, n_gpu_layers=0)
    assert none.weights == {}
    assert none.cache == 0
    experts = buffers_of(GPT_OSS_20B, 4096, n_cpu_moe=24)
    assert sum(experts.weights.values()) < sum(buffers_of(GPT_OSS_20B, 4096).weights.values()) / 3


def test_the_report_has_no_reserve_and_says_what_is_on_the_host() -> None:
    report = estimate(ModelSpec.from_config(LLAMA3_8B), InferenceSetup(engine="llama.cpp", seq_len=4096), "24GB")
    assert report.peak.allocated_bytes == report.peak.reserved_bytes
    parts = {part.name: part.bytes for part in report.components.other_overhead.parts}
    assert parts["KV cache"] == 512 * MIB
    assert parts["compute buffer"] / MIB == pytest.approx(258.5)
    assert any(line.code == "llama_cpp_host" for line in report.assumptions)


def test_a_gguf_file_is_placed_tensor_by_tensor(tmp_path: Path) -> None:
    start, size = gguf(*llama_gguf())
    path = tmp_path / "model-Q4_K_M.gguf"
    with path.open("wb") as file:
        file.write(start)
        file.truncate(size)
    whole, part = (
        answer("from-file", str(path), "--mode", "inference", *options) for options in ((), ("--n-gpu-layers", "2"))
    )
    weights = [found["components"]["model_weights"]["peak_bytes"] for found in (whole, part)]
    assert weights[1] < weights[0]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--engine", "vllm", "--n-gpu-layers", "4"], "--n-gpu-layers belongs to --engine llama.cpp"),
        (["--engine", "llama.cpp", "--kv-dtype", "int8", "--cache-type-k", "q8_0"], "leave it out"),
        (["--engine", "llama.cpp", "--flash-attn", "off", "--cache-type-v", "q8_0"], "only with flash attention"),
        (["--engine", "llama.cpp", "--quantization", "nf4"], "give the .gguf as the model"),
        (["--engine", "llama.cpp", "--cache-type-k", "q6_k"], "--cache-type-k cannot be 'q6_k'"),
    ],
)
def test_options_that_cannot_be(tmp_path: Path, options: list[str], says: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA3_8B))
    assert says in refused(2, "from-file", str(path), "--mode", "inference", *options)


@pytest.mark.parametrize("engine", ["llama.cpp", "vllm", "sglang", "tgi"])
@pytest.mark.parametrize(("kind", "network"), [("vit", "ViTForImageClassification"), ("hubert", "HubertForCTC")])
def test_models_that_read_no_text_are_refused(kind: str, network: str, engine: Any) -> None:
    spec = ModelSpec.from_config({"model_type": kind, "architectures": [network]})
    with pytest.raises(UsageError, match=f"{kind} reads none; leave out --engine"):
        estimate(spec, InferenceSetup(engine=engine, seq_len=512))


@pytest.mark.parametrize("engine", ["transformers", "llama.cpp"])
def test_the_encoder_of_t5_decodes_nothing(engine: Any) -> None:
    config = {"model_type": "t5", "architectures": ["T5EncoderModel"], "num_layers": 2, "d_ff": 128}
    report = estimate(ModelSpec.from_config(config), InferenceSetup(engine=engine))
    assert "encoder_one_pass" in {assumption.code for assumption in report.assumptions}
    assert report.kv_cache_bytes == 0
