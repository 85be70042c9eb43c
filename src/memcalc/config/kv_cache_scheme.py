"""Which dtype a repository asks its serving engine to keep keys and values in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from memcalc.config.quantization import Quantization

_KEYS = ("kv_cache_scheme", "kv_cache_quant_algo", "kv_cache_dtype", "kv_cache_quantization")
"""compressed-tensors and ModelOpt; `hf_quant_config.json` of ModelOpt; vLLM's own word."""

_WORDS = {"FP8": "fp8", "FP8_E4M3": "fp8", "FP8_E5M2": "fp8", "INT8": "int8", "NVFP4": "nvfp4", "FP4": "nvfp4"}
_NOTHING = ("", "AUTO", "NONE", "NULL", "BF16", "FP16", "BFLOAT16", "FLOAT16")


@dataclass(frozen=True)
class CacheScheme:
    """What the repository states: the dtype (`fp8`, `int8`, `nvfp4`, or its own word), and where."""

    dtype: str
    where: str


def kv_cache_scheme(stated: Quantization | None) -> CacheScheme | None:
    """The scheme that a quantized repository states; None where its cache is to be as wide as its activations."""
    if stated is None:
        return None
    for key in _KEYS:
        dtype = _dtype(stated.settings.get(key))
        if dtype is not None:
            return CacheScheme(dtype, f"{stated.where}.{key}")
    export = stated.settings.get("export")
    groups = export.get("kv_cache_group") if isinstance(export, Mapping) else None
    return CacheScheme("fp8", f"{stated.where}.export.kv_cache_group") if groups else None


def _dtype(value: Any) -> str | None:
    if isinstance(value, str):
        word = value.strip().upper()
        return None if word in _NOTHING else _WORDS.get(word, value)
    if isinstance(value, Mapping) and value:
        kind = "fp" if value.get("type") == "float" else "int"
        bits = value.get("num_bits")
        return "nvfp4" if (kind, bits) == ("fp", 4) else f"{kind}{bits}" if type(bits) is int else None
    return None
