"""Pipeline schedules: in which order a rank runs the micro-batches of its stages forward and backward.

Source: torch/distributed/pipelining/schedules.py of PyTorch 2.14 (ScheduleGPipe, Schedule1F1B,
ScheduleInterleaved1F1B).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from memcalc.parallel.setup import ParallelSetup


@dataclass(frozen=True)
class Action:
    """One micro-batch through one of the rank's stages, by its place among them; forward or backward."""

    stage: int
    forward: bool


def actions(layout: ParallelSetup, rank: int) -> Iterator[Action]:
    """What a rank does in one step, in order."""
    count = layout.microbatches
    if layout.schedule == "gpipe":
        yield from (Action(0, True) for _ in range(count))
        yield from (Action(0, False) for _ in range(count))
    elif layout.schedule == "1f1b":
        yield from _one_forward_one_backward(count, min(count, layout.pipeline - rank))
    else:
        yield from _interleaved(layout, rank)


def _one_forward_one_backward(count: int, warmup: int) -> Iterator[Action]:
    yield from (Action(0, True) for _ in range(warmup))
    for done in range(count):
        yield Action(0, False)
        if warmup + done < count:
            yield Action(0, True)


def _interleaved(layout: ParallelSetup, rank: int) -> Iterator[Action]:
    count, ranks, virtual = layout.microbatches, layout.pipeline, layout.virtual
    per_round = count // max(1, count // ranks)
    warmup = min((virtual - 1) * per_round + 2 * (ranks - 1 - rank), count * virtual)
    total = count * virtual
    for step in range(total + warmup):
        if step < total:
            yield Action(step // per_round % virtual, True)
        if step >= warmup:
            yield Action(virtual - 1 - (step - warmup) // per_round % virtual, False)


def in_flight(layout: ParallelSetup, rank: int) -> int:
    """The most micro-batches that a rank has run forward and not yet backward, over all of its stages."""
    live = most = 0
    for action in actions(layout, rank):
        live += 1 if action.forward else -1
        most = max(most, live)
    return most
