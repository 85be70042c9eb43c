"""Many setups at once, on all processors: the results are those of a loop, in its order."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

Given = TypeVar("Given")
Result = TypeVar("Result")

ALONE = 200
"""Setups below which one process is as fast: each of the others has to begin first."""
_AT_A_TIME = 16


def each(work: Callable[[Given], Result], items: Sequence[Given]) -> Iterator[Result]:
    """`work` of every item, in order. `work` and what it takes and gives are pickled where there are many items.

    What `work` raises is raised here.
    """
    processors = _processors()
    if len(items) < ALONE or processors == 1:
        yield from map(work, items)
        return
    ways = multiprocessing.get_all_start_methods()
    context = multiprocessing.get_context("fork" if "fork" in ways else ways[0])
    with context.Pool(processors, initializer=_quietly) as pool:  # ended where the reader stops, and with Ctrl-C
        yield from pool.imap(work, items, chunksize=_AT_A_TIME)


def _quietly() -> None:
    """Leave Ctrl-C to the process that waits for the answers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _processors() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
