"""The largest whole number whose size fits, in few evaluations of the size."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import isqrt, sqrt

ENDLESS = 1 << 80
"""A size that fits nowhere."""

LIMIT = 1 << 24
"""No answer is larger: more sequences or tokens than any job has."""

_ALIGNED = 8
"""Kernels copy masks whose rows are no multiple of this long, so that sizes rise along its multiples only."""

_GROWTH = 64
"""How much further to look where nothing tells how fast the size grows."""


def largest_fit(
    size: Callable[[int], int], room: int, limit: int = LIMIT, known: Mapping[int, int] | None = None
) -> int:
    """The largest n from 1 to `limit` with `size(n) <= room`, 0 where there is none.

    Sizes of this program are nearly linear or quadratic in n, so that two of them tell about where the answer is. Only
    evaluated sizes count: that of the answer fits, those of one more and of the next multiple of 8 do not.

    Args:
        size: bytes of n; they never fall along the multiples of 8, nor between two of them. 0 where n is too small to
            have any, ENDLESS where it is too large.
        room: the most that fits.
        limit: the largest n that may be.
        known: sizes that need no evaluation.
    """
    sizes = {n: nbytes for n, nbytes in (known or {}).items() if 1 <= n <= limit}
    if sizes.get(1, 0) > room:
        return 0
    low, high = _between(size, room, sizes, (0, limit + 1), _ALIGNED)
    return _between(size, room, sizes, (low, high), 1)[0]


def _between(
    size: Callable[[int], int], room: int, sizes: dict[int, int], ends: tuple[int, int], step: int
) -> tuple[int, int]:
    """The largest multiple of `step` between two numbers that fits, and the next one: the smallest that does not.

    The first of the two numbers fits, or is 0, the second does not. What is evaluated is put into `sizes`.
    """
    inside = [n for n in sizes if ends[0] < n < ends[1] and not n % step]
    low = max((n for n in inside if sizes[n] <= room), default=ends[0])
    high = min((n for n in inside if sizes[n] > room), default=ends[1])
    forward = backward = step  # how far to go from either end at least; doubles where that was too little
    rose = True
    slow = 0  # how many evaluations in a row left more than half of what was open
    while low + step < high:
        width, last = high - low, (high - 1) // step * step  # `last` may be the answer
        guess = _guess(sizes, room, low, high)
        if slow > 1 and high in sizes:  # guesses come nearer from one side: one beyond bounds it from the other
            guess = 2 * guess - (low if rose else high)
        guess = min(max(guess, low + forward), max(high - backward, low + step), last)
        if forward + backward >= width or (slow > 3 and high in sizes):
            guess = max(_middle(low, high), low + step)
        guess = guess // step * step
        sizes[guess] = size(guess)
        if rose := sizes[guess] <= room:
            low, forward, backward = guess, 2 * forward if guess == low + forward else step, step
        else:
            high, forward, backward = guess, step, 2 * backward if guess == high - backward else step
        slow = slow + 1 if 2 * (high - low) > width else 0
    return low, high


def _guess(sizes: Mapping[int, int], room: int, low: int, high: int) -> int:
    """Where the size would reach `room` if it went on from `low` as it does between the numbers that are near."""
    start = low or max((n for n in sizes if n < high and sizes[n] <= room), default=0)
    if not start:
        return 1
    seen = sorted((n for n in sizes if n != start and 0 < sizes[n] < ENDLESS), key=lambda n: abs(n - start))
    other = high if high in seen else next((n for n in seen if n < start), None)
    if other is None or not sizes[start] or (sizes[other] - sizes[start]) * (other - start) <= 0:
        return _middle(low, high) if high in sizes else _GROWTH * start
    third = next((n for n in seen if n != other), None)
    first, second = [None if n is None else (n - start, sizes[n] - sizes[start]) for n in (other, third)]
    assert first is not None
    guess = start + int(_reach(first, second, room - sizes[start]))
    return _middle(low, high) if guess >= high and high in sizes else guess


def _reach(first: tuple[int, int], second: tuple[int, int] | None, height: int) -> float:
    """Where a parabola through (0, 0) and two other points, or a line through one, is as high as `height`."""
    slope, bend = first[1] / first[0], 0.0
    if second is not None:
        bend = (second[1] / second[0] - slope) / (second[0] - first[0])
        slope -= bend * first[0]
    inside = slope * slope + 4 * bend * height
    if slope <= 0 or inside < 0:
        return height * first[0] / first[1]
    return 2 * height / (slope + sqrt(inside))


def _middle(low: int, high: int) -> int:
    """A number between the two that are given, in proportion where they are far apart."""
    return isqrt(low * high) if 0 < 4 * low < high else (low + high) // 2
