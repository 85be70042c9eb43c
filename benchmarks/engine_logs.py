"""What serving engines print when they start, beside what memcalc says: writes docs/engine-logs.md.

vLLM's pools are `tests/data/published/vllm_pools.jsonl`, with the source of each; llama.cpp's buffers are
`tests/data/llama_cpp_buffers.jsonl`, which a build of 2026 printed for files of these shapes on a software GPU.
"""

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from memcalc import InferenceSetup, ModelSpec, estimate, find_gpu
from memcalc.inference.llama_cpp.buffers import buffers
from memcalc.inference.served_model import served_model

DATA = Path(__file__).resolve().parent.parent / "tests" / "data"
PAGE = DATA.parent.parent / "docs" / "engine-logs.md"
GIB, MIB = 2**30, 2**20

_OPTIONS = ("tensor_parallel_size", "max_num_batched_tokens", "max_num_seqs", "dtype", "engine_version")


def lines() -> Iterable[str]:
    """The page."""
    yield "# What serving engines print, and what memcalc says\n"
    yield "`python benchmarks/engine_logs.py` writes this page; docs/accuracy.md has training and Transformers.\n"
    yield "## vLLM: the pool of its startup log\n"
    yield (
        "*Available KV cache memory* on one GPU, GiB. Total, share and lengths are those of the log; weights, profile "
        "run and what lies outside torch are memcalc's. Constants of the rules were read off some of these logs, so "
        "the errors say how well one set of rules fits them all, not how well it foretells another. Logs without an "
        "address were found in public repositories by their text alone.\n"
    )
    yield "| model | GPU | vLLM | log | memcalc | error | source |\n|---|---|---|---:|---:|---:|---|"
    for row in _rows("published/vllm_pools.jsonl"):
        pool, said = _pool(row) / GIB, row["pool_gib"]
        gpus = f"{row['tensor_parallel_size']} × {row['gpu']}" if row["tensor_parallel_size"] > 1 else row["gpu"]
        yield (
            f"| {row['model']} | {gpus} | {row['engine_version']} | {said:.2f} | {pool:.2f} | {pool / said - 1:+.1%} | "
            f"{row['source']} |"
        )
    yield "\n## llama.cpp: the buffers that it prints\n"
    yield "MiB on the GPU; host buffers and caches are in the tests.\n"
    yield "| model | context | options | weights | memcalc | cache | memcalc | compute | memcalc | error |"
    yield "|---|---:|---|---:|---:|---:|---:|---:|---:|---:|"
    for row in _rows("llama_cpp_buffers.jsonl"):
        yield _buffers(row)


def _rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (DATA / name).read_text().splitlines()]


def _pool(row: dict[str, Any]) -> int:
    gpu = find_gpu(row["gpu"])
    options: dict[str, Any] = {name: row[name] for name in _OPTIONS if row[name] is not None}
    options |= {"enforce_eager": True} if row["enforce_eager"] else {}
    setup = InferenceSetup(
        engine="vllm", seq_len=row["length"] - 1, gpu_memory_utilization=row["utilization"], **options
    )
    report = estimate(
        ModelSpec.from_config(row["config"]), setup, replace(gpu, usable_bytes=int(row["total_gib"] * GIB))
    )
    assert report.serving is not None
    assert report.serving.pool is not None
    return report.serving.pool.pool_bytes


def _buffers(row: dict[str, Any]) -> str:
    given, printed = {k: v for k, v in row["options"].items() if v is not None}, row["mib"]
    context, slots = given.pop("n_ctx"), given.pop("slots")
    setup = InferenceSetup(engine="llama.cpp", dtype="fp16", batch=slots, **given)
    spec = ModelSpec.from_config(row["config"])
    found = buffers(spec, setup, served_model(spec, setup), context // slots, encoder=False)
    words = [
        f"{name} {value}" for name, value in given.items() if value is not False and value not in ("f16", "on", 512)
    ]
    words += [f"{slots} slots"] if slots > 1 else []
    ours = [sum(found.weights.values()) / MIB, found.cache / MIB, found.compute / MIB]
    sizes = [
        f"{printed[name]:.2f} | {mine:.2f}" for name, mine in zip(("model", "cache", "compute"), ours, strict=True)
    ]
    error = ours[2] / printed["compute"] - 1
    return f"| {row['config']['model_type']} | {context} | {', '.join(words)} | {' | '.join(sizes)} | {error:+.1%} |"


if __name__ == "__main__":
    PAGE.write_text("\n".join(lines()) + "\n")
