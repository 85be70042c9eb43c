"""What each layer of an unknown decoder is like: its window, heads and MLP, as far as the config's keys tell."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from memcalc.errors import ConfigError

_FULL = ("full_attention", "full", "attention", "global", "global_attention")
_SLIDING = ("sliding_attention", "sliding", "local", "local_attention", "sliding_window", "sliding_window_attention")

GLOBAL_KEYS = ("global_head_dim", "num_global_key_value_heads", "num_global_attention_heads")
"""What layers that attend to everything have instead of the usual number; Gemma 4's keys."""

LAYER_KEYS = frozenset(
    {
        "layer_types",
        "sliding_window",
        "sliding_window_size",
        "use_sliding_window",
        "sliding_window_pattern",
        "max_window_layers",
        "first_k_dense_replace",
        "moe_layer_freq",
        "decoder_sparse_step",
        "mlp_only_layers",
        "interleave_moe_layer_step",
        *GLOBAL_KEYS,
    }
)
"""Keys that this module takes into account."""


def layer_lists(given: Mapping[str, Any], sizes: Mapping[str, Any]) -> dict[str, list[int]]:
    """A list for each size that may differ by layer, with an entry for each layer; windows of 0 are none.

    Raises ConfigError where a list is not as long as the model is deep, or names a kind of layer that is not known.
    """
    depth = int(sizes["num_hidden_layers"])
    windows = _windows(given, depth)
    heads = _each(sizes, "num_attention_heads", depth)
    kv_heads = _each(sizes, "num_key_value_heads", depth, default=heads)
    dims = _each(sizes, "head_dim", depth, default=[int(sizes["hidden_size"]) // count for count in heads])
    everywhere = not any(windows)
    for key, values in (
        ("num_global_attention_heads", heads),
        ("num_global_key_value_heads", kv_heads),
        ("global_head_dim", dims),
    ):
        if isinstance(given.get(key), int) and given[key] and not everywhere:
            values[:] = [value if window else given[key] for value, window in zip(values, windows, strict=True)]
    return {
        "layer_windows": windows,
        "layer_heads": heads,
        "layer_kv_heads": kv_heads,
        "layer_head_dims": dims,
        "layer_widths": _each(sizes, "intermediate_size", depth),
        "layer_experts": _experts(given, sizes, depth),
    }


def _each(sizes: Mapping[str, Any], key: str, depth: int, default: list[int] | None = None) -> list[int]:
    value = sizes.get(key)
    if value is None and default is not None:
        return list(default)
    values = list(value) if isinstance(value, list | tuple) else [value] * depth
    numbers = [item for item in values if type(item) is int and item > 0]
    if len(numbers) != depth or len(values) != depth:
        raise ConfigError(
            f"--generic needs {key!r} as a whole number, or as one for each of the {depth} layers; correct config.json."
        )
    return numbers


def _windows(given: Mapping[str, Any], depth: int) -> list[int]:
    """The window of each layer: by `layer_types`, by a pattern, or the same everywhere."""
    window = given.get("sliding_window") or given.get("sliding_window_size")
    types, pattern = given.get("layer_types"), given.get("sliding_window_pattern")
    if isinstance(types, list | tuple):
        return _by_types(types, window, depth)
    if not isinstance(window, int) or given.get("use_sliding_window") is False:
        return [0] * depth
    if isinstance(pattern, list | tuple) and len(pattern) == depth:
        return [window if slides else 0 for slides in pattern]
    if type(pattern) is int and pattern > 1:
        return [0 if (layer + 1) % pattern == 0 else window for layer in range(depth)]
    if given.get("use_sliding_window") and type(given.get("max_window_layers")) is int:
        return [window if layer >= given["max_window_layers"] else 0 for layer in range(depth)]
    return [window] * depth


def _by_types(types: list[Any] | tuple[Any, ...], window: Any, depth: int) -> list[int]:
    unknown = sorted({str(kind) for kind in types} - {*_FULL, *_SLIDING})
    if unknown:
        raise ConfigError(
            f"config.json has {', '.join(map(repr, unknown))} among its 'layer_types', which --generic does not know; "
            "`memcalc inspect` counts what the files hold."
        )
    if len(types) != depth:
        raise ConfigError(f"config.json has {len(types)} 'layer_types' for {depth} layers; they must agree.")
    slides = [kind in _SLIDING for kind in types]
    if any(slides) and not isinstance(window, int):
        raise ConfigError("config.json has layers with a sliding window, but no 'sliding_window'; add it.")
    return [window if slide else 0 for slide in slides]


def _experts(given: Mapping[str, Any], sizes: Mapping[str, Any], depth: int) -> list[int]:
    """1 for each layer with experts: all but the first dense ones, or every n-th."""
    if not sizes.get("num_experts"):
        return [0] * depth
    frequency = given.get("moe_layer_freq")
    if isinstance(frequency, list | tuple) and len(frequency) == depth:
        return [int(bool(item)) for item in frequency]
    first = given.get("first_k_dense_replace") or 0
    step = next(
        (
            given[key]
            for key in ("decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_freq")
            if type(given.get(key)) is int and given[key] > 0
        ),
        1,
    )
    dense = given.get("mlp_only_layers") or []
    return [int(layer >= first and layer not in dense and (layer + 1) % step == 0) for layer in range(depth)]
