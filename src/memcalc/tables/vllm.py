"""What vLLM profiles before it allocates its pool of pages, by version; and its defaults by card.

The pool is total x gpu_memory_utilization less weights, the peak of a profile run, memory outside torch and, in some
versions, CUDA graphs (vllm/worker/worker.py to 0.8, vllm/v1/worker/gpu_worker.py since). The profile run passes
max_num_batched_tokens tokens through the model and samples for max_num_seqs sequences.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from memcalc.common.escaping import quoted
from memcalc.errors import UsageError
from memcalc.tables.gpus import Gpu

MIB, GIB = 2**20, 2**30

BLOCK = 16
"""Tokens of a page (CacheConfig.DEFAULT_BLOCK_SIZE)."""

LATEST = (0, 30)
"""The last version whose logs were read; it is taken where nobody names one."""


@dataclass(frozen=True, kw_only=True)
class Release:
    """Rules that hold from version `first` on.

    utilization: the default of gpu_memory_utilization.
    whole_prompts: max_num_batched_tokens is max_model_len, up to 32768, and chunks come only with longer ones (V0).
    chunk: max_num_batched_tokens where prompts are prefilled in chunks; None: by card.
    hidden_tensors: tensors of the hidden size that live beside those of an MLP when it needs most.
    all_reduce_tensors: how many more with tensor parallelism, whose all-reduce is out of place.
    sampler_bytes: bytes that sampling needs for one logit.
    non_torch: memory outside torch that appears between the start and the end of the profile run, on one GPU.
    graphs_in_budget: CUDA graphs are estimated and taken off the pool; if not, they come on top of the share.
    """

    first: tuple[int, int]
    utilization: float = 0.9
    whole_prompts: bool = False
    chunk: int | None = None
    hidden_tensors: int = 3
    all_reduce_tensors: int = 0
    sampler_bytes: int
    non_torch: int
    graphs_in_budget: bool = False
    source: str


_SORT = (
    "sampling sorts the logits: 38 bytes each, measured with PyTorch's allocator on the sampler's operations (logits "
    "in 16 bits and in fp32, values, indices, and the scratch of torch.sort)"
)

RELEASES: tuple[Release, ...] = (
    Release(
        first=(0, 26),
        utilization=0.92,
        sampler_bytes=6,
        non_torch=70 * MIB,
        source="v0.26.0 and v0.27.1 with the V2 runner, whose profile run samples without top-k and top-p: 16-bit and "
        "fp32 logits; CUDA graphs are not taken off; 0.92 since v0.25",
    ),
    Release(
        first=(0, 21),
        sampler_bytes=14,
        non_torch=70 * MIB,
        graphs_in_budget=True,
        source="v0.21.0: an estimate of CUDA graphs is taken off unless VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=0",
    ),
    Release(
        first=(0, 16),
        sampler_bytes=14,
        non_torch=50 * MIB,
        source="v0.19.0: top-k and top-p without a sort (FlashInfer or Triton): 16-bit and fp32 logits, masked logits, "
        "probabilities",
    ),
    Release(first=(0, 8), sampler_bytes=38, non_torch=50 * MIB, source=f"V1 engine, v0.8.5 to v0.15: {_SORT}"),
    Release(
        first=(0, 7),
        whole_prompts=True,
        chunk=2048,
        hidden_tensors=4,
        all_reduce_tensors=1,
        sampler_bytes=38,
        non_torch=60 * MIB,
        source=f"V0 engine, v0.7.2: {_SORT}",
    ),
    Release(
        first=(0, 6),
        whole_prompts=True,
        chunk=512,
        sampler_bytes=38,
        non_torch=300 * MIB,
        source=f"V0 engine, v0.6.4 to v0.6.6: {_SORT}",
    ),
)
"""The latest first. Each was read off startup logs, which tests/data/published/vllm_pools.jsonl lists with links."""

_NVLINK = ("H100", "H200", "H20", "H800", "GH200", "B200", "B300", "GB200", "GB300")
NON_TORCH_NVLINK = 1650 * MIB
"""NCCL with NVLink SHARP, custom all-reduce and symmetric memory on each GPU: 1.38 (H200, two), 1.63 (B300, four), 1.70
(H20, four), 1.74 (H200, eight) and 1.84 GiB (H100, four) in startup logs."""
NON_TORCH_PCIE = 240 * MIB
"""The same without NVLink SHARP: 0.20 (RTX 3090, sixteen), 0.21 (L40S, four), 0.25 (RTX 4090, two) to 0.39 GiB."""

CUDA_GRAPHS = 740 * MIB
"""CUDA graphs of a decoder: 0.37 to 0.78 GiB of models from 0.5B to 14B (estimated 0.73 for 86 sizes); 0.09 with few
sizes, 2.4 to 3.5 of mixtures over several GPUs."""

V1_CAPABILITY = (8, 0)
"""The V1 engine of v0.8 to v0.10 wants this compute capability; older GPUs ran V0."""

CHUNKED_ABOVE = 32768
"""In V0, models with a longer context were prefilled in chunks."""

LARGE_CARD = 70 * GIB
"""From this much memory on, and not on an A100, defaults are larger (EngineArgs.get_batch_defaults)."""

DEFAULT_TOKENS: Mapping[bool, int] = MappingProxyType({True: 8192, False: 2048})
DEFAULT_SEQUENCES: Mapping[bool, int] = MappingProxyType({True: 1024, False: 256})
"""max_num_batched_tokens and max_num_seqs of `vllm serve`: on a large card, and on another."""


def release(version: str | None, gpu: Gpu | None = None) -> Release:
    """The rules of a version such as 0.11.0 on `gpu`; those of the latest for None.

    Raises UsageError for a version that is none, or older than all rules.
    """
    numbers = LATEST if version is None else _numbers(version)
    capability = V1_CAPABILITY if gpu is None or gpu.compute_capability is None else gpu.compute_capability
    if (0, 8) <= numbers <= (0, 10) and capability < V1_CAPABILITY:
        numbers = (0, 7)
    for row in RELEASES:
        if numbers >= row.first:
            return row
    raise UsageError(f"what vLLM {version} profiles is not known; --engine-version takes 0.6.4 and later.")


def _numbers(version: str) -> tuple[int, int]:
    found = re.match(r"v?(\d{1,4})\.(\d{1,4})(\D|$)", version)
    if found is None:
        raise UsageError(f"--engine-version cannot be {quoted(version)}; give it as vLLM prints it, such as 0.11.0.")
    return int(found[1]), int(found[2])


def is_large(gpu: Gpu | None) -> bool:
    """Whether vLLM takes its larger defaults; they are taken where no GPU is named."""
    return gpu is None or (gpu.usable_bytes >= LARGE_CARD and "A100" not in gpu.name)


def batched_tokens(rules: Release, gpu: Gpu | None, length: int) -> int:
    """The default of max_num_batched_tokens for sequences of up to `length` tokens."""
    if rules.whole_prompts and length <= CHUNKED_ABOVE:
        return max(length, 2048)
    return rules.chunk or DEFAULT_TOKENS[is_large(gpu)]


def sequences(rules: Release, gpu: Gpu | None) -> int:
    """The default of max_num_seqs."""
    return DEFAULT_SEQUENCES[not rules.whole_prompts and is_large(gpu)]


def non_torch(rules: Release, gpu: Gpu | None, gpus: int) -> int:
    """Bytes outside torch on each of `gpus` GPUs of a tensor-parallel group."""
    if gpus == 1:
        return rules.non_torch
    linked = gpu is not None and gpu.name.split("-")[0] in _NVLINK
    return max(rules.non_torch, NON_TORCH_NVLINK if linked else NON_TORCH_PCIE)
