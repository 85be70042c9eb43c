"""Options of engines that a model at hand has no use for: refused where they are not computed, else told."""

from __future__ import annotations

from collections.abc import Iterator

from memcalc.common.assumption import Assumption
from memcalc.errors import UsageError, option_name
from memcalc.inference.engine_cache import PooledCache
from memcalc.nn.kv_cache import Cache
from memcalc.setup.inference_conflicts import OPTIONS_OF
from memcalc.setup.setup import InferenceSetup


def refuse_llama_cpp_options(setup: InferenceSetup, model_type: str) -> None:
    """For a model whose run under llama.cpp is computed by its modules, not by llama.cpp's graph.

    Raises UsageError for the first option of llama.cpp that was given.
    """
    for name in OPTIONS_OF["llama.cpp"] if setup.engine == "llama.cpp" else ():
        if name in setup.model_fields_set and getattr(setup, name) not in (None, False):
            raise UsageError(
                f"{option_name(name)} is computed for models of text alone, and {model_type} reads more than a "
                "decoder's text; leave it out, or ask for its text model by itself."
            )


def idle_llama_cpp_options(
    setup: InferenceSetup, *, cached: bool, windowed: bool, experts: bool
) -> Iterator[Assumption]:
    """Options of llama.cpp that change nothing.

    Args:
        setup: the options.
        cached: the model has a KV cache.
        windowed: some of its layers attend within a window.
        experts: it is a mixture of experts.
    """
    idle = {
        "n_cpu_moe": None if experts else "this model has no experts",
        "swa_full": None if windowed else "no layer of this model attends within a window",
        **dict.fromkeys(
            ("cache_type_k", "cache_type_v", "flash_attn"), None if cached else "this model has no KV cache"
        ),
    }
    for name, why in idle.items():
        if why is not None and name in setup.model_fields_set and getattr(setup, name) not in (None, False):
            yield Assumption(f"{name}_unused", f"{option_name(name)} changes nothing: {why}")


def idle_kv_dtype(setup: InferenceSetup, cache: Cache | None) -> Iterator[Assumption]:
    """`--kv-dtype` where nothing was put into the pool of keys and values."""
    cached = not isinstance(cache, PooledCache) or cache.widths
    if not cached and "kv_dtype" in setup.model_fields_set and setup.kv_dtype != "auto":
        yield Assumption("kv_dtype_unused", "--kv-dtype changes nothing: this model has no KV cache")
