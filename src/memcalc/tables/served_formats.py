"""Which stored quantizations an inference engine does not load. One row an engine.

Sources: AutoQuantizationConfig of Transformers 5.24 (quantizers/auto.py), QUANTIZATION_METHODS of vLLM 0.10 and of
SGLang 0.5 (layers/quantization/__init__.py).
"""

from __future__ import annotations

from collections.abc import Mapping

_SERVERS = ("quanto", "eetq", "mlx", "bitnet", "higgs", "vptq", "spqr", "sinq")

_NOT_LOADED: Mapping[str, tuple[str, ...]] = {
    "transformers": ("modelopt", "mlx"),
    "transformers-static": ("modelopt", "mlx"),
    "vllm": _SERVERS,
    "sglang": (*_SERVERS, "hqq"),
}


def does_not_load(engine: str, method: str) -> str | None:
    """Why `engine` cannot load weights that were quantized by `method`, and who can; None where it can."""
    if method not in _NOT_LOADED.get(engine, ()):
        return None
    others = [name for name, refused in _NOT_LOADED.items() if method not in refused and "-static" not in name]
    who = f"--engine {' or '.join(others)} can" if others else "MLX runs them on Apple's GPUs"
    return f"{engine} does not load {method} weights ({who})"
