"""SGLang's defaults by the size of a GPU: tokens of one prefill pass, and the share for weights and cache.

Source: python/sglang/srt/server_args.py of 2025, `_handle_gpu_memory_settings`. Sizes there are MiB, as
nvidia-smi reports the whole GPU.
"""

from __future__ import annotations

from typing import NamedTuple

from memcalc.tables.gpus import Gpu

_MIB = 2**20


class Defaults(NamedTuple):
    """`chunked_prefill_size` in tokens, and `mem_fraction_static`."""

    chunked_prefill_size: int
    mem_fraction_static: float


_TIERS = ((20, 2048, 8, 8), (35, 2048, 24, 80), (60, 4096, 32, 160), (160, 8192, 256, 512))
"""GiB below which a GPU has so many tokens of a pass, and the largest batch in CUDA graphs on fewer than 4 GPUs, or
more."""

_LARGEST = (16384, 512, 512)


def defaults(gpu: Gpu, gpus: int = 1) -> Defaults:
    """What SGLang takes on `gpus` of a kind where nobody says it, for a model of text."""
    memory = gpu.total_bytes / _MIB
    tokens, few, many = next((tier[1:] for tier in _TIERS if memory < tier[0] * 1024), _LARGEST)
    kept = 512 + max(tokens, 2048) * 1.5 + 2 * (few if gpus < 4 else many) + gpus / 8 * 1024
    if memory > 60 * 1024:
        kept = max(kept, 10 * 1024)
    return Defaults(tokens, round((memory - kept) / memory, 3))
