"""What a GPU can serve: the most sequences at once, and the longest context of one.

Memory never falls when batch or length grows, so both are found by bisection over `generate`, not by another formula.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from memcalc.setup.setup import InferenceSetup

LIMIT = 1 << 24
"""No answer is larger: more sequences or tokens than any job has."""


@dataclass(frozen=True)
class Capacity:
    """Largest batch at the setup's length, and longest context at batch one; 0 where not even one fits."""

    batch: int
    context: int


def capacity(
    setup: InferenceSetup, seq_len: int, fits: Callable[[InferenceSetup], bool], context_limit: int | None
) -> Capacity:
    """Bisect for what `fits`; no more sequences than --max-num-seqs lets run at once.

    The context ends at `context_limit`, the positions of the model, if they end.
    """
    longest, most = min(context_limit or LIMIT, LIMIT), setup.max_num_seqs or LIMIT
    return Capacity(
        _largest(lambda n: fits(setup.model_copy(update={"batch": n, "seq_len": seq_len})), most),
        _largest(lambda n: fits(setup.model_copy(update={"batch": 1, "seq_len": n})), longest),
    )


def _largest(holds: Callable[[int], bool], limit: int) -> int:
    """The largest n up to `limit` for which `holds`, 0 if it does not for one."""
    low, high = 0, 1
    while high < limit and holds(high):
        low, high = high, min(2 * high, limit)
    if high == limit and holds(limit):
        return limit
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
