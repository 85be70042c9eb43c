"""Inference engines: how each keeps its caches, which dtypes it offers for them, what it reserves. One row an engine.

A row says what the engine's documentation states; what memcalc has measured (Transformers) the tape runs op by op.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal

from memcalc.common.assumption import Assumption
from memcalc.errors import UsageError
from memcalc.tables.dtypes import FP32, DType

AUTO: Final = "auto"
"""The cache has the dtype that the model computes in."""


@dataclass(frozen=True)
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
GGML_TYPES: Mapping[str, CacheFormat] = MappingProxyType(
    {
        "f32": CacheFormat(32),
        "f16": CacheFormat(16),
        "bf16": CacheFormat(16),
        "q8_0": CacheFormat(8, 32, 16),
        "q5_1": CacheFormat(5, 32, 32),
        "q5_0": CacheFormat(5, 32, 16),
        "q4_1": CacheFormat(4, 32, 32),
        "q4_0": CacheFormat(4, 32, 16),
        "iq4_nl": CacheFormat(4, 32, 16),
    }
)
"""Types of llama.cpp's cache (--cache-type-k, --cache-type-v): blocks of 32 with 16-bit scales, and minima in _1."""
_GGML = {"int8": CacheFormat(8, 32, 16), "int4": CacheFormat(4, 32, 16)}
"""Blocks of 32 with one 16-bit scale: ggml's q8_0 (34 bytes) and q4_0 (18 bytes)."""


@dataclass(frozen=True, kw_only=True)
class Engine:
    """An inference engine.

    `cache` is how it keeps keys and values: growing by concatenation (dynamic), allocated once for the longest sequence
    (static), or in pages of `page` tokens taken from a pool (paged). `caps_windows` says whether layers with a sliding
    window keep no more than it. `formats` are the dtypes that it offers for the cache, `auto` what it takes by itself
    (None: what the model computes in). `utilization` is the share of the GPU that it fills with weights, activations
    and pool; None where it takes only what it needs. `batched_tokens` is the most tokens of one pass of prefill; None
    for the whole prompt. `attention` is that of its own kernels, which work on its pages; None where it takes the
    setup's. `compute` is the dtype of its activations; None for that of the weights. `reads_gguf`: it loads GGUF
    weights as they are stored. `follows_scheme`: its cache is quantized by itself where the repository says so.
    """

    name: str
    cache: Literal["dynamic", "static", "paged"]
    page: int = 1
    caps_windows: bool = True
    formats: Mapping[str, CacheFormat]
    auto: CacheFormat | None = None
    utilization: float | None = None
    batched_tokens: int | None = None
    attention: str | None = None
    compute: DType | None = None
    reads_gguf: bool = False
    follows_scheme: bool = False
    notes: tuple[Assumption, ...] = ()
    source: str

    def format(self, kv_dtype: str, dtype: str) -> CacheFormat | None:
        """How a cache of this dtype is stored; None for the model's own `dtype`. UsageError where there is none."""
        if kv_dtype == AUTO:
            return self.auto
        if kv_dtype == dtype and self.compute is None:
            return None
        if kv_dtype not in self.formats:
            raise UsageError(
                f"engine {self.name} has no {kv_dtype} cache; it offers {', '.join((AUTO, *self.formats))} "
                "(--kv-dtype)."
            )
        return self.formats[kv_dtype]


_KERNELS = Assumption(
    "engine_kernels",
    "activations are those of Transformers' modules with fused attention; an engine's other kernels need less",
)
_PROFILE = Assumption(
    "vllm_profile",
    "vLLM's pool is what its profile run leaves of its share, by rules that were read off startup logs of v0.6.4 to "
    "v0.28 (within 5 % of all; --engine-version, --max-num-batched-tokens, --max-num-seqs)",
)
_GRAPHS = Assumption("cuda_graphs", "CUDA graphs take further memory, which the documentation gives no number for")

ENGINES: dict[str, Engine] = {
    row.name: row
    for row in (
        Engine(
            name="transformers",
            cache="dynamic",
            formats=_QUANTO | _FP8,
            source="Transformers 5.24: DynamicCache; QuantizedCache, which keeps up to 127 tokens in full precision "
            "but for fp8. Measured rows",
        ),
        Engine(
            name="transformers-static",
            cache="static",
            formats={},
            source="Transformers 5.24: StaticCache, allocated at the first token for the prompt and all new tokens",
        ),
        Engine(
            name="vllm",
            cache="paged",
            page=16,
            formats=_FP8,
            utilization=0.92,
            batched_tokens=8192,
            attention="flash",
            follows_scheme=True,
            reads_gguf=True,
            notes=(_KERNELS, _PROFILE),
            source="vLLM documentation, engine arguments: block_size 16, kv_cache_dtype auto or fp8; hybrid KV cache "
            "manager for sliding windows. Shares, batched tokens and the pool are in tables/vllm.py, by version",
        ),
        Engine(
            name="sglang",
            cache="paged",
            formats=_FP8,
            utilization=0.88,
            batched_tokens=8192,
            attention="flash",
            follows_scheme=True,
            notes=(_KERNELS, _GRAPHS),
            source="SGLang documentation, server arguments: page_size 1, kv_cache_dtype fp8_e5m2 or fp8_e4m3; share "
            "and tokens of a pass by GPU are in `sglang.py`, these are for none that is named",
        ),
        Engine(
            name="tgi",
            cache="paged",
            caps_windows=False,
            formats=_FP8,
            utilization=1.0,
            batched_tokens=4096,
            attention="flash",
            follows_scheme=True,
            notes=(_KERNELS, _GRAPHS),
            source="Text Generation Inference documentation, launcher arguments: cuda_memory_fraction 1.0, "
            "kv_cache_dtype fp8, max_batch_prefill_tokens 4096; every layer is paged in full",
        ),
        Engine(
            name="llama.cpp",
            cache="static",
            formats=_PLAIN | _GGML,
            auto=_PLAIN["fp16"],
            batched_tokens=512,
            attention="flash",
            compute=FP32,
            reads_gguf=True,
            notes=(
                Assumption(
                    "llama_cpp_dtypes",
                    "llama.cpp computes in fp32, and its cache is fp16 unless --cache-type-k and --cache-type-v say "
                    "otherwise",
                ),
            ),
            source="llama.cpp documentation of the server: --cache-type-k/v f32, f16 (default), bf16, q8_0 (int8), "
            "q4_0 (int4), --ubatch-size 512, a cache for the whole context, --swa-full to keep window layers in full; "
            "ggml: activations in F32",
        ),
    )
}
