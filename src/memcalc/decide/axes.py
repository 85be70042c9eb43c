"""Options that are given several values: `1..64`, `64..4096*2` or `1024,2048,4096`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from memcalc.common.escaping import quoted
from memcalc.errors import UsageError

MOST = 100_000
"""Setups that one sweep may have."""

_RANGE = re.compile(r"(\d{1,9})\.\.(\d{1,9})(?:([*+])(\d{1,9}))?")
_GIVE = ": give one such as 1..64, 256..4096+256 or 1..64*2."


@dataclass(frozen=True)
class Axis:
    """An option with the texts of its values, in the order in which they were given."""

    name: str
    values: tuple[str, ...]


def read_axis(name: str, option: str, text: str) -> Axis:
    """The values of an option: with commas, as a range `a..b`, or one with a step, `a..b+s` or `a..b*s`.

    Raises:
        UsageError: an empty value, or a a word with ".." that is no range.
    """
    values: list[str] = []
    for word in text.split(","):
        if (found := _RANGE.fullmatch(word.strip())) is not None:
            values += _range(option, word.strip(), *found.groups())
        elif ".." in word:
            raise UsageError(f"{option} {quoted(word.strip())} is no range{_GIVE}")
        elif word.strip():
            values.append(word.strip())
        else:
            raise UsageError(f"{option} {quoted(text)} has an empty value: give values with commas, or a range 1..64.")
    return Axis(name, tuple(dict.fromkeys(values)))


def _range(option: str, text: str, first: str, last: str, sign: str | None, step: str | None) -> Iterator[str]:
    value, end, by = int(first), int(last), int(step or 1)
    endless = by < (2 if sign == "*" else 1) or (sign == "*" and value < 1)
    if value > end or endless:
        why = "begins above its end" if value > end else "never ends"
        raise UsageError(f"{option} {quoted(text)} is no range, as it {why}{_GIVE}")
    if sign != "*" and (end - value) // by >= MOST:
        raise UsageError(
            f"{option} {quoted(text)} has more than {MOST:,} values: give a larger step, such as {value}..{end}*2."
        )
    while value <= end:
        yield str(value)
        value = value * by if sign == "*" else value + by


def combinations(axes: Sequence[Axis]) -> Iterator[Mapping[str, str]]:
    """Every combination of one value of each axis, the last axis changing fastest. Raises UsageError for too many."""
    count = 1
    for axis in axes:
        count *= len(axis.values)
    if count > MOST:
        raise UsageError(f"the sweep has {count:,} setups, and at most {MOST:,} are computed: give fewer values.")
    for values in product(*(axis.values for axis in axes)):
        yield {axis.name: value for axis, value in zip(axes, values, strict=True)}
