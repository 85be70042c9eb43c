"""The largest whole number whose size fits, in few evaluations of a size that never falls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import isqrt

ENDLESS = 1 << 80
"""A size that fits nowhere."""

LIMIT = 1 << 24
"""No answer is larger: more sequences or tokens than any job has."""

_GROWTH = 64
"""How much further to look where nothing tells how fast the size grows."""


def largest_fit(
    size: Callable[[int], int], room: int, limit: int = LIMIT, known: Mapping[int, int] | None = None
) -> int:
    """The largest n from 1 to `limit` with `size(n) <= room`, 0 where there is none.

    Sizes of this program are nearly linear or quadratic in n, so that two of them tell about where the answer is. Only
    evaluated sizes count: that of the answer fits, and that of one more does not.

    Args:
        size: bytes of n; they never fall as n grows. 0 where n is too small to have any, ENDLESS where it is too large.
        room: the most that fits.
        limit: the largest n that may be.
        known: sizes that need no evaluation.
    """
    sizes = {n: nbytes for n, nbytes in (known or {}).items() if 1 <= n <= limit}
    low = max((n for n in sizes if sizes[n] <= room), default=0)
    high = min((n for n in sizes if sizes[n] > room), default=limit + 1)
    forward = backward = 1  # the least step from either end; each doubles while only that end moves
    slow = 0  # how many evaluations in a row left more than half of what was open
    while (width := high - low) > 1:
        guess = min(max(_guess(sizes, room, low, high), low + forward), high - backward)
        if forward + backward >= width or (slow > 1 and high in sizes):
            guess = _middle(low, high)
        sizes[guess] = size(guess)
        if sizes[guess] <= room:
            low, forward, backward = guess, 2 * forward, 1
        else:
            high, forward, backward = guess, 1, 2 * backward
        slow = slow + 1 if 2 * (high - low) > width else 0
    return low


def _guess(sizes: Mapping[int, int], room: int, low: int, high: int) -> int:
    """Where the size would reach `room` if it went on from `low` in a straight line."""
    if not low:
        return 1
    seen = [n for n in sizes if n != low and 0 < sizes[n] < ENDLESS]
    other = high if high in seen else max((n for n in seen if n < low), default=None)
    rise = 0 if other is None or not sizes[low] else (sizes[other] - sizes[low]) * (1 if other > low else -1)
    if other is None or not rise:
        return _middle(low, high) if high in sizes else _GROWTH * low
    guess = low + (room - sizes[low]) * abs(other - low) // rise
    return _middle(low, high) if guess >= high and high in sizes else guess


def _middle(low: int, high: int) -> int:
    """A number strictly between the two that are given, in proportion where they are far apart."""
    return isqrt(low * high) if 0 < 4 * low < high else (low + high) // 2
