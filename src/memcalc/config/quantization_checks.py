"""Whether what a config says of its quantization can be: sizes, flags and names, before anything is computed from them.

Sources: the quantization config classes of Transformers 5 (utils/quantization_config.py) and what their __post_init__
refuses; compressed-tensors' QuantizationArgs.
"""

from collections.abc import Mapping
from typing import Any

from memcalc.common.escaping import quoted
from memcalc.errors import ConfigError

WIDEST_BITS = 16
LARGEST_GROUP = 2**20

_BITS = ("bits", "w_bit", "num_bits", "nbits")
_GROUPS = ("group_size", "q_group_size")
_FLAGS = ("load_in_4bit", "load_in_8bit", "bnb_4bit_use_double_quant", "desc_act", "sym", "zero_point")
_NAMED = ("targets", "modules_in_block_to_quantize")
_LISTED = ("modules_to_not_convert", "llm_int8_skip_modules", "ignored_layers", "ignore", "exclude_modules", "exclude")


def check_settings(settings: Mapping[str, Any], where: str, depth: int = 4) -> None:
    """Check one statement, which stands under `where`, and the objects in it.

    Raises:
        ConfigError: a width, a size of groups or blocks, a flag, or a list of modules cannot be.
    """
    for key, value in settings.items():
        if value is None:
            continue
        if key in _BITS and not _is_size(value, WIDEST_BITS):
            raise _wrong(key, where, value, f"a whole number of 1 to {WIDEST_BITS}")
        if key in _GROUPS and value != -1 and not _is_size(value, LARGEST_GROUP):
            raise _wrong(key, where, value, f"-1, or a whole number of 1 to {LARGEST_GROUP}")
        if key in ("weight_block_size", "block_structure") and not _is_block(value):
            raise _wrong(key, where, value, "two whole numbers above zero")
        if key in _FLAGS and not isinstance(value, bool):
            raise _wrong(key, where, value, "true or false")
        if key in _LISTED and not isinstance(value, list | tuple | bool | str):
            raise _wrong(key, where, value, "a list of names of modules")
        if key in _NAMED and not _are_names(value):
            raise _wrong(key, where, value, "a list of names of modules")
        if key == "config_groups" and not isinstance(value, Mapping):
            raise _wrong(key, where, value, "an object")
        if isinstance(value, Mapping) and depth:
            check_settings(value, f"{where}.{key}", depth - 1)
    bits = settings.get("bits")
    if settings.get("quant_method") == "gptq" and bits is not None and str(bits) not in ("2", "3", "4", "8"):
        raise _wrong("bits", where, bits, "2, 3, 4 or 8")
    if settings.get("load_in_4bit") and settings.get("load_in_8bit"):
        raise ConfigError(
            f"config.json gives 'load_in_4bit' and 'load_in_8bit' in '{where}', which exclude each other; correct one."
        )


def nameless(settings: Mapping[str, Any], where: str) -> ConfigError | None:
    """The error for a statement that says something, but not which method it is about; None for one that is empty."""
    named = settings.get("quant_method")
    if named is not None:
        return _wrong("quant_method", where, named, "the name of a method, such as gptq")
    if all(value in (None, False, [], {}) for value in settings.values()):
        return None
    return ConfigError(
        f"config.json has '{where}', but no 'quant_method' in it says which quantization that is; add it, or remove "
        f"'{where}'."
    )


def _is_size(value: Any, largest: int) -> bool:
    if isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) < 9:
        value = int(value)
    return type(value) is int and 1 <= value <= largest


def _are_names(value: Any, depth: int = 1) -> bool:
    """A list of names, or of lists of names."""
    return isinstance(value, list | tuple) and all(
        isinstance(item, str) or (depth and _are_names(item, depth - 1)) for item in value
    )


def _is_block(value: Any) -> bool:
    if isinstance(value, str):  # compressed-tensors writes "128x128"
        value = value.split("x")
    return isinstance(value, list | tuple) and len(value) == 2 and all(_is_size(side, LARGEST_GROUP) for side in value)


def _wrong(key: str, where: str, value: Any, due: str) -> ConfigError:
    return ConfigError(f"config.json gives '{key}' in '{where}' as {quoted(value)}, but it must be {due}; correct it.")
