"""vLLM's pool of pages against what its startup logs say (tests/data/published/vllm_pools.jsonl has the links)."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.cli_runs import refused, run

from memcalc import InferenceSetup, ModelSpec, estimate, find_gpu
from memcalc.errors import UsageError
from memcalc.tables.vllm import RELEASES, release

GIB = 2**30
LOGS = [
    json.loads(line)
    for line in (Path(__file__).parents[1] / "data/published/vllm_pools.jsonl").read_text().splitlines()
]
SMALL = {
    "model_type": "llama",
    "hidden_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "intermediate_size": 2816,
    "vocab_size": 32000,
    "max_position_embeddings": 8192,
}


def pool_of(config: dict[str, Any], gpu: Any, **options: Any) -> Any:
    gpu = find_gpu(gpu) if isinstance(gpu, str) else gpu
    return estimate(ModelSpec.from_config(config), InferenceSetup(engine="vllm", **options), gpu).serving.pool


def logged(row: dict[str, Any]) -> Any:
    gpu = find_gpu(row["gpu"])
    assert gpu is not None
    names = ("tensor_parallel_size", "max_num_batched_tokens", "max_num_seqs", "dtype", "engine_version")
    options = {name: row[name] for name in names if row[name] is not None}
    options |= {"enforce_eager": True} if row["enforce_eager"] else {}
    return pool_of(
        row["config"],
        replace(gpu, usable_bytes=int(row["total_gib"] * GIB)),
        seq_len=row["length"] - 1,
        gpu_memory_utilization=row["utilization"],
        **options,
    )


@pytest.mark.parametrize("row", LOGS, ids=lambda row: f"{row['model'].split('/')[-1]} {row['engine_version']}")
def test_the_pool_is_that_of_the_log(row: dict[str, Any]) -> None:
    pool = logged(row)
    assert pool.pool_bytes / GIB == pytest.approx(row["pool_gib"], rel=0.05)
    tokens = row["tokens"] or 16 * (row["blocks"] or 0)
    if tokens:
        assert pool.pool_tokens == pytest.approx(tokens, rel=0.05)
    parts = {"weights": pool.weights_bytes, "activations": pool.activations_bytes}
    for name, nbytes in parts.items():
        if name in row["logged"] and "pad" not in row.get("note", ""):
            assert nbytes / GIB == pytest.approx(row["logged"][name], rel=0.1, abs=0.25), name


def test_what_the_profile_run_depends_on() -> None:
    base = pool_of(SMALL, "RTX-4090", seq_len=4096)
    assert (base.profiled_tokens, base.profiled_sequences) == (2048, 256)
    large = pool_of(SMALL, "H100", seq_len=4096)
    assert (large.profiled_tokens, large.profiled_sequences) == (8192, 1024)
    assert pool_of(SMALL, "A100-80GB", seq_len=4096).profiled_tokens == 2048
    fewer = pool_of(SMALL, "RTX-4090", seq_len=4096, max_num_seqs=8, max_num_batched_tokens=512)
    assert fewer.activations_bytes < base.activations_bytes
    assert pool_of(SMALL, "RTX-4090", seq_len=4096, enforce_eager=True).cuda_graphs_bytes == 0
    older = pool_of(SMALL, "RTX-4090", seq_len=4096, engine_version="0.11.0")
    assert older.activations_bytes > base.activations_bytes
    assert older.budget_bytes < base.budget_bytes


def test_the_smallest_share_would_do_and_one_less_would_not() -> None:
    options: dict[str, Any] = {"seq_len": 4096, "batch": 32}
    least = pool_of(SMALL, "RTX-4090", **options).smallest_utilization
    for share, fits in ((least, True), (round(least - 0.01, 2), False)):
        setup = InferenceSetup(engine="vllm", gpu_memory_utilization=share, **options)
        assert estimate(ModelSpec.from_config(SMALL), setup, "RTX-4090").gpu.fits is fits
    assert pool_of({**SMALL, "num_hidden_layers": 4000}, "RTX-4090", seq_len=64).smallest_utilization is None


def test_a_pool_that_cannot_be_is_negative_and_serves_nothing() -> None:
    report = estimate(
        ModelSpec.from_config({**SMALL, "num_hidden_layers": 4000}), InferenceSetup(engine="vllm"), "RTX-4090"
    )
    assert report.serving.pool is not None
    assert report.serving.pool.pool_bytes < 0
    assert report.serving.pool.pool_tokens == 0
    assert (report.serving.largest_batch, report.serving.longest_context) == (0, 0)
    assert not report.gpu.fits


def test_versions() -> None:
    assert release(None) is release("0.30.1") is RELEASES[0]
    assert release("v0.6.4.post1").first == (0, 6)
    assert release("0.8.5", find_gpu("T4")).first == (0, 7)  # Turing ran V0
    assert release("0.8.5", find_gpu("A100-80GB")).first == (0, 8)
    for version, says in (("0.5.4", "0.6.4 and later"), ("latest", "as vLLM prints it")):
        with pytest.raises(UsageError, match=says):
            release(version)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--engine", "sglang", "--max-num-seqs", "4"], "--max-num-seqs belongs to --engine vllm"),
        (["--engine", "vllm", "--batch", "8", "--max-num-seqs", "4"], "--batch 8 is more than the 4 sequences"),
        (["--engine", "vllm", "--prefill-chunk-size", "4", "--max-num-batched-tokens", "8"], "leave one of them out"),
    ],
)
def test_options_that_cannot_be(tmp_path: Path, options: list[str], says: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(SMALL))
    assert says in refused(2, "from-file", str(path), "--mode", "inference", *options)


def test_the_line_of_the_box(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(SMALL))
    text = run("from-file", str(path), "--mode", "inference", "--engine", "vllm", "--gpu", "RTX-4090").stdout
    assert "its pool:" in text
    assert "--gpu-memory-utilization 0." in text
