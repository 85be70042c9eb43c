"""Inference engines: how each keeps its caches, which dtypes it offers for them, and what it reserves. One row an engine.

A row says what the engine's documentation states; where memcalc has measured it (Transformers), the tape runs it op by op.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from memcalc.errors import UsageError

AUTO: Final = "auto"
"""The cache has the dtype that the model computes in."""


@dataclass(frozen=True, slots=True)
class CacheFormat:
    """How an element of the cache is stored: bits, and bits of constants shared by a group of elements."""

    bits: int
    group: int = 0
    constant_bits: int = 0

    def nbytes(self, elements: int) -> int:
        """Bytes of `elements` stored so."""
        groups = -(-elements // self.group) if self.group else 0
        return -(-(elements * self.bits + groups * self.constant_bits) // 8)


_PLAIN = {"fp32": CacheFormat(32), "bf16": CacheFormat(16), "fp16": CacheFormat(16)}
_FP8 = {"fp8": CacheFormat(8)}
_QUANTO = {"int8": CacheFormat(8, 64, 32), "int4": CacheFormat(4, 64, 32)}
"""Scale and shift in 16 bits for 64 elements each: `QuantizedCacheConfig.q_group_size` of Transformers."""
_GGML = {"int8": CacheFormat(8, 32, 16), "int4": CacheFormat(4, 32, 16)}
"""Blocks of 32 with one 16-bit scale: ggml's q8_0 (34 bytes) and q4_0 (18 bytes)."""


@dataclass(frozen=True, slots=True)
class Engine:
    """An inference engine.

    `cache` is how it keeps keys and values: growing by concatenation, allocated once for the longest sequence, or in pages of
    `page` tokens taken from a pool. `caps_windows` says whether layers with a sliding window keep no more than it.
    `utilization` is the share of the GPU that the engine fills with weights, activations and pool; None where it takes
    only what it needs. `batched_tokens` is the most tokens that one forward pass of prefill takes; None for the whole prompt.
    """

    name: str
    cache: str
    page: int
    caps_windows: bool
    utilization: float | None
    formats: Mapping[str, CacheFormat]
    source: str
    batched_tokens: int | None = None
    notes: tuple[str, ...] = field(default=())

    def format(self, kv_dtype: str) -> CacheFormat | None:
        """How a cache of this dtype is stored; None for the model's own. Raises UsageError where the engine has none."""
        if kv_dtype == AUTO:
            return None
        if kv_dtype not in self.formats:
            raise UsageError(
                f"engine {self.name} has no {kv_dtype} cache; it offers {', '.join((AUTO, *self.formats))} (--kv-dtype)."
            )
        return self.formats[kv_dtype]


_KERNELS = "activations are those of Transformers' modules with the same attention; an engine's fused kernels need less"

ENGINES: dict[str, Engine] = {
    row.name: row
    for row in (
        Engine(
            "transformers", "dynamic", 1, True, None, _QUANTO,
            "Transformers 5.24, DynamicCache and QuantizedCache (residual of 128 tokens in full precision); measured rows",
        ),
        Engine(
            "transformers-static", "static", 1, True, None, {},
            "Transformers 5.24, StaticCache: allocated at the first token for prompt and new tokens",
        ),
        Engine(
            "vllm", "paged", 16, True, 0.9, _FP8,
            "vLLM documentation, engine arguments: block_size 16, gpu_memory_utilization 0.9, kv_cache_dtype auto or fp8; "
            "hybrid KV cache manager for sliding windows; max_num_batched_tokens 8192 when serving", 8192,
            (_KERNELS,),
        ),
        Engine(
            "sglang", "paged", 1, True, 0.9, _FP8,
            "SGLang documentation, server arguments: mem_fraction_static 0.9, page_size 1, kv_cache_dtype fp8_e5m2 or fp8_e4m3; "
            "chunked_prefill_size 8192", 8192, (_KERNELS,),
        ),
        Engine(
            "tgi", "paged", 1, False, 1.0, _FP8,
            "Text Generation Inference documentation, launcher arguments: cuda_memory_fraction 1.0, kv_cache_dtype fp8; every "
            "layer is paged in full; max_batch_prefill_tokens 4096", 4096, (_KERNELS,),
        ),
        Engine(
            "llama.cpp", "static", 1, True, None, _PLAIN | _GGML,
            "llama.cpp documentation of the server: --cache-type-k/v f32, f16, bf16, q8_0 (int8), q4_0 (int4); the cache is "
            "allocated for the whole context; --swa-full keeps window layers in full; --ubatch-size 512", 512, (_KERNELS,),
        ),
    )
}  # fmt: skip
