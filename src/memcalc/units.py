"""Bytes and counts to text and back. The only place that divides by 2**30 or 1e9; every printed size says its unit."""

import re
from collections.abc import Iterator
from typing import Literal

from memcalc.common.escaping import quoted
from memcalc.errors import UsageError

Unit = Literal["GiB", "GB"]

_BINARY = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10}
_DECIMAL = {"GB": 10**9, "MB": 10**6, "KB": 10**3}
_SCALES: dict[Unit, dict[str, int]] = {"GiB": _BINARY, "GB": _DECIMAL}

_SIZE_UNITS = {name.lower(): factor for name, factor in {**_BINARY, **_DECIMAL}.items()} | {
    "b": 1,
    "tib": 2**40,
    "tb": 10**12,
}
_COUNT_UNITS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}

# Whole digits, fraction, power of ten; the lengths keep the arithmetic small. A comma stands between thousands only:
# in 4,5B it is a decimal comma, and would make it 45B.
_WHOLE = r"[0-9]{1,3}(?:,[0-9]{3}){1,20}|[0-9][0-9_]{0,60}"
_NUMBER = (
    rf"(?P<whole>{_WHOLE}|(?=\.[0-9]))"
    r"(?:\.(?P<fraction>[0-9]{1,60}))?(?:e\+?(?P<exponent>[0-9]{1,3}))?"
)
_SIZE = re.compile(_NUMBER + r"\s*(?P<unit>[a-z]*)", re.IGNORECASE)
_EXPERTS = re.compile(r"[1-9][0-9]*x[0-9.]+[bm]", re.IGNORECASE)
_ACTIVE = re.compile(r"(?P<total>[0-9.]+[bm])-a[0-9.]+[bm]", re.IGNORECASE)

# Below and above these no transformer exists; a bare "4" is a forgotten letter, not a model of four parameters.
FEWEST_PARAMETERS = 10_000
MOST_PARAMETERS = 10**15
LARGEST_SIZE = 2**50
"""Largest size that an option takes, bytes (1 PiB): more is a slip of the keyboard."""


def format_bytes(nbytes: int, unit: Unit = "GiB") -> str:
    """`nbytes` with its unit, such as `"22.5 GiB"`; below a tenth of that unit in the next smaller one.

    `unit` chooses the family: GiB, MiB, KiB (powers of 1024) or GB, MB, KB (powers of 1000).
    """
    for name, factor in _SCALES[unit].items():
        if abs(nbytes) * 10 >= factor:
            return f"{nbytes / factor:,.1f} {name}"
    return f"{nbytes} B"


def format_mib(nbytes: int) -> str:
    """`nbytes` in MiB whatever their size, such as `"710.2 MiB"`."""
    return f"{nbytes / _BINARY['MiB']:,.1f} MiB"


def round_step(top: int, unit: Unit = "GiB", most: int = 5) -> int:
    """Bytes between the marks of an axis that ends at `top`: 1, 2 or 5 times a power of ten of a unit.

    There are at most `most` marks, 0 not counted.
    """
    factor = next((factor for factor in _SCALES[unit].values() if top >= factor), 1)
    steps: Iterator[int] = (-(-factor * count * 10**power // 10) for power in range(20) for count in (1, 2, 5))
    return next(step for step in steps if step and step * most >= top)


def counted(count: int, noun: str) -> str:
    """A count and what is counted, such as `"1 head"` or `"32 heads"`; `noun` is the singular."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def format_count(count: int) -> str:
    """A count of parameters in three digits, such as `"4.05B"`, `"124M"` or `"70.6B"`."""
    for letter, factor in (("T", 10**12), ("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if count >= factor:
            value = count / factor
            digits = 2 if value < 10 else 1 if value < 100 else 0
            return f"{value:.{digits}f}{letter}"
    return str(count)


def parse_size(text: str, what: str = "The size") -> int:
    """Bytes in `text`: `24GB`, `80GiB`, `500MiB`, `1.5 TB`, or a plain number of bytes such as `8_519_680`.

    `what` names the option in messages.

    Raises:
        UsageError: not a size, negative, ambiguous (`24G`), or over `LARGEST_SIZE`.
    """
    match = _SIZE.fullmatch(text.strip())
    examples = "give a number with a unit, such as 24GB, 80GiB or 500MiB"
    if match is None:
        raise UsageError(f"{what} {quoted(text)} is not a size: {examples}.")
    unit = match["unit"].lower() or "b"
    if unit in ("k", "m", "g", "t"):
        letter = unit.upper()
        raise UsageError(f"{what} {quoted(text)} has an ambiguous unit: write {letter}iB (1024) or {letter}B (1000).")
    if unit not in _SIZE_UNITS:
        raise UsageError(f"{what} {quoted(text)} has the unknown unit {quoted(match['unit'])}: {examples}.")
    value = _scaled(match, _SIZE_UNITS[unit])
    if value > LARGEST_SIZE:
        raise UsageError(f"{what} {quoted(text)} is larger than any memory: {examples}.")
    return value


def parse_parameters(text: str) -> int:
    """How many parameters `text` means: `4B`, `1.1b`, `350M`, `125k`, `1.5T`, `4e9`, `7_000_000_000`, `8030261248`.

    Raises:
        UsageError: not a count, not finite, negative, zero, a size in bytes, a mixture of experts' short name, or
            outside `FEWEST_PARAMETERS` .. `MOST_PARAMETERS`.
    """
    given = text.strip()
    examples = "give a count such as 4B, 350M or 8030261248"
    if not given:
        raise UsageError(f"The parameter count is empty: {examples}.")
    _refuse_experts(given)
    match = _SIZE.fullmatch(given)
    if match is None:
        raise UsageError(f"The parameter count {quoted(text)} is not a positive number: {examples}.")
    unit = match["unit"].lower()
    if unit not in _COUNT_UNITS:
        if unit in _SIZE_UNITS:
            raise UsageError(f"The parameter count {quoted(text)} is a size in bytes: {examples}.")
        raise UsageError(f"The parameter count {quoted(text)} ends in the unknown {quoted(match['unit'])}: {examples}.")
    value = _scaled(match, _COUNT_UNITS[unit])
    if value > MOST_PARAMETERS:
        raise UsageError(f"The parameter count {quoted(text)} is larger than any model: {examples}.")
    if value < FEWEST_PARAMETERS:
        forgotten = f"; did you mean {given}B?" if unit == "" and value >= 1 else f": {examples}."
        raise UsageError(f"The parameter count {quoted(text)} is smaller than any transformer{forgotten}")
    return value


def _refuse_experts(given: str) -> None:
    if _EXPERTS.fullmatch(given):
        raise UsageError(
            f"The parameter count {quoted(given)} names experts, which share layers, so it is no count: "
            "give the model's real total (Mixtral 8x7B has 46.7B), or its config.json to from-file."
        )
    if active := _ACTIVE.fullmatch(given):
        total = active["total"]
        raise UsageError(
            f"The parameter count {quoted(given)} names a mixture of experts with {total} parameters in total: "
            f"give its config.json to from-file, or {total} for a dense model of that size."
        )


def _scaled(match: re.Match[str], factor: int) -> int:
    """`factor` times the number of a `_NUMBER` match, rounded down. Exact: 1.1 is eleven tenths, not a double."""
    whole, fraction = re.sub("[_,]", "", match["whole"]), match["fraction"] or ""
    power: int = 10 ** int(match["exponent"] or 0)
    divisor: int = 10 ** len(fraction)
    return int(whole + fraction) * power * factor // divisor
