"""`PYTORCH_CUDA_ALLOC_CONF`: how a user tunes PyTorch's allocator, in PyTorch's own syntax.

Source: c10/core/AllocatorConfig.{h,cpp} and c10/cuda/CUDAAllocatorConfig.h of PyTorch 2.14.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from memcalc.common.escaping import quoted
from memcalc.common.sizes import ALIGNMENT, rounded
from memcalc.errors import UsageError, close_matches

_MB = 2**20
SMALL_SIZE = _MB
"""Largest request that counts as small (kSmallSize)."""
_INTERVALS = 16
"""Powers of two from 1 MiB to 64 GiB, each with a number of divisions of its own (kRoundUpPowerOfTwoIntervals)."""
_NO_DIVISIONS = (0,) * _INTERVALS


@dataclass(frozen=True)
class AllocatorConf:
    """The settings that decide where device memory goes; sizes in bytes.

    `max_split_size` is None where every block may be split. `roundup_power2_divisions` says for each power of two
    from 1 MiB on into how many steps it is divided; 0 rounds to 512 bytes.
    """

    expandable_segments: bool = False
    max_split_size: int | None = None
    max_non_split_rounding: int = 20 * _MB
    roundup_power2_divisions: tuple[int, ...] = _NO_DIVISIONS
    garbage_collection_threshold: float = 0.0
    large_segment_size: int = 20 * _MB
    without_effect: tuple[str, ...] = ()
    """Settings that were given and change nothing on the device."""

    def rounded(self, nbytes: int) -> int:
        """Bytes of the block that `nbytes` are looked for in."""
        if self.roundup_power2_divisions is _NO_DIVISIONS or nbytes < ALIGNMENT:
            return max(rounded(nbytes), ALIGNMENT)
        interval = min(max(nbytes.bit_length() - SMALL_SIZE.bit_length(), 0), _INTERVALS - 1)
        divisions = self.roundup_power2_divisions[interval]
        if divisions < 2 or nbytes <= ALIGNMENT * divisions:
            return rounded(nbytes)
        step = (1 << nbytes.bit_length() - 1) // divisions
        return -(-nbytes // step) * step


DEFAULT_CONF = AllocatorConf()


def parse_alloc_conf(text: str) -> AllocatorConf:
    """What `PYTORCH_CUDA_ALLOC_CONF=text` sets. Raises UsageError where PyTorch would not take it.

    `text` is a list of `name:value` with commas between, such as `expandable_segments:True,max_split_size_mb:512`.
    """
    values: dict[str, object] = {}
    without_effect: list[str] = []
    for name, value in _settings(text):
        if name in _WITHOUT_EFFECT:
            without_effect.append(name)
            continue
        if name not in _PARSERS:
            raise UsageError(
                f"--alloc-conf {quoted(name)} is no setting of PYTORCH_CUDA_ALLOC_CONF"
                f"{close_matches(name, [*_PARSERS, *_WITHOUT_EFFECT]) or '; it takes ' + ', '.join(_PARSERS) + '.'}"
            )
        field, parse = _PARSERS[name]
        parsed = parse(name, value)
        if field:
            values[field] = parsed
    return AllocatorConf(**values, without_effect=tuple(without_effect))  # type: ignore[arg-type]


def _settings(text: str) -> Iterator[tuple[str, str]]:
    """Names and values; a value in brackets may hold commas and colons."""
    for item in re.split(r",(?![^\[]*\])", re.sub(r"\s", "", text)):
        name, _, value = item.partition(":")
        if not item:
            continue  # PyTorch takes an empty list, and a comma at the end
        if not name or not value:
            raise UsageError(
                f"--alloc-conf {quoted(text)} is not a list of name:value, such as "
                "expandable_segments:True,garbage_collection_threshold:0.8."
            )
        yield name, value


def _refused(name: str, value: str, wanted: str) -> UsageError:
    return UsageError(f"--alloc-conf {name}:{quoted(value)} is not {wanted}.")


def _boolean(name: str, value: str) -> bool:
    if value not in ("True", "False"):
        raise _refused(name, value, "True or False")
    return value == "True"


def _whole(name: str, value: str, at_least: int, what: str) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", value) or int(value) < at_least:
        raise _refused(name, value, what)
    return int(value)


def _megabytes(name: str, value: str) -> int:
    return _whole(name, value, 20, "a whole number of MiB of at least 20") * _MB


def _segment(name: str, value: str) -> int:
    return _whole(name, value, 11, "a whole number of MiB of more than 10") * _MB


def _fraction(name: str, value: str) -> float:
    if not re.fullmatch(r"0?\.[0-9]{1,9}", value) or not float(value):
        raise _refused(name, value, "a number between 0 and 1")
    return float(value)


def _backend(name: str, value: str) -> None:
    if value != "native":
        raise _refused(name, value, "native: memcalc simulates PyTorch's own allocator")


def _divisions(name: str, value: str) -> tuple[int, ...]:
    """Either one number for all sizes, or [64:8,256:4,>:1]: from so many MiB on, so many divisions."""
    if not value.startswith("["):
        return (_power_of_two(name, value),) * _INTERVALS
    found = [0] * _INTERVALS
    index = -1
    for item in value[1:-1].split(","):
        bound, colon, count = item.partition(":")
        divisions = 0 if count == "0" else _power_of_two(name, count if colon else item)
        if bound == ">":
            found[index + 1 :] = [divisions] * (_INTERVALS - index - 1)
            continue
        first = index < 0
        index = min(_power_of_two(name, bound).bit_length() - 1, _INTERVALS - 1)
        found[0 if first else index : index + 1] = [divisions] * (index + 1 if first else 1)
    return tuple(found)


def _power_of_two(name: str, value: str) -> int:
    number = _whole(name, value, 1, "a power of two, or a list such as [256:1,512:2,>:4]")
    if number & number - 1:
        raise _refused(name, value, "a power of two")
    return number


_PARSERS: dict[str, tuple[str, Callable[[str, str], object]]] = {
    "expandable_segments": ("expandable_segments", _boolean),
    "max_split_size_mb": ("max_split_size", _megabytes),
    "roundup_power2_divisions": ("roundup_power2_divisions", _divisions),
    "garbage_collection_threshold": ("garbage_collection_threshold", _fraction),
    "max_non_split_rounding_mb": ("max_non_split_rounding", _megabytes),
    "large_segment_size_mb": ("large_segment_size", _segment),
    "backend": ("", _backend),
}
"""Settings that decide where device memory goes: the field, and what reads its value."""

_WITHOUT_EFFECT = frozenset(
    {
        "release_lock_on_cudamalloc",
        "pinned_use_cuda_host_register",
        "pinned_num_register_threads",
        "pinned_reserve_segment_size_mb",
        "pinned_use_background_threads",
        "pinned_max_round_threshold_mb",
        "pinned_max_cached_size_mb",
        "pinned_free_catch_all",
        "graph_capture_record_stream_reuse",
    }
)
"""Settings that PyTorch takes and that do not change what is reserved on the device."""
