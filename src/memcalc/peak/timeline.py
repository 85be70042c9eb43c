"""The memory of one step over time, at any resolution, without losing its maximum.

The clock is the tape's: it counts allocations, not seconds. Blocks that were not traced follow from those that were, as
in the sweep: of a run of equal blocks each further one adds the same to every row, so cost grows with the kinds of
blocks and with the resolution, not with depth.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby

from memcalc.autograd.spans import TracedBlock
from memcalc.peak.sweep import Moment, Sweep

Rows = tuple[int, ...]
"""Bytes of the six rows, in the order of the box."""

OFF_TAPE_SHARE = 12
"""A phase that is one moment (the optimizer's step) is drawn as long as one in so many of all allocations."""


@dataclass(frozen=True)
class Run:
    """`count` equal blocks one after another, or a stretch between blocks.

    rows: bytes of each row at every tick of the first block.
    change: what each further block adds to them.
    first, stride: position of the first block in its stack, and the way to the next (1, or -1 in backward).
    drawn: how long the run is on the axis, where that is not its number of samples.
    """

    phase: str
    rows: Sequence[Sequence[int]]
    block: TracedBlock | None = None
    first: int = 0
    stride: int = 1
    count: int = 1
    change: Rows = (0,) * 6
    start: int | None = None
    drawn: int = 0

    @cached_property
    def totals(self) -> list[int]:
        """Bytes of all rows at every tick of the first block."""
        return [sum(values) for values in zip(*self.rows, strict=True)]

    @property
    def samples(self) -> int:
        """Samples of all blocks."""
        return len(self.totals) * self.count

    @property
    def length(self) -> int:
        """How long the run is on the axis."""
        return self.drawn or self.samples

    def highest(self, start: int, end: int) -> tuple[int, int, int]:
        """The largest total within samples [start, end): its bytes, its block (counted from 0) and its tick."""
        ticks = len(self.totals)
        (first, begin), (last, stop) = divmod(start, ticks), divmod(end - 1, ticks)
        if first == last:
            return self._highest_of(first, begin, stop + 1)
        found = [self._highest_of(first, begin, ticks), self._highest_of(last, 0, stop + 1)]
        if last - first > 1:  # of whole blocks the first or the last is the largest
            found += [self._highest_of(first + 1, 0, ticks), self._highest_of(last - 1, 0, ticks)]
        return max(found, key=lambda one: one[0])

    def _highest_of(self, block: int, begin: int, stop: int) -> tuple[int, int, int]:
        part = self.totals[begin:stop]
        most = max(part)
        return most + block * sum(self.change), block, begin + part.index(most)

    def rows_at(self, block: int, tick: int) -> Rows:
        """Bytes of each row at `tick` of the block counted from 0."""
        return tuple(row[tick] + block * change for row, change in zip(self.rows, self.change, strict=True))


@dataclass(frozen=True)
class Sample:
    """The fullest moment of a piece of the axis.

    position: the block's place in its stack, counted from 0; None between blocks.
    tick: the tape's clock; None in a phase that is not on the tape.
    """

    phase: str
    stack: str | None
    position: int | None
    depth: int | None
    tick: int | None
    rows: Rows

    @property
    def total(self) -> int:
        """Bytes of all rows."""
        return sum(self.rows)


@dataclass(frozen=True)
class Stretch:
    """Where a phase runs, or one pass over a stack in it: from `start` to `end`, in pieces of the axis.

    first, last: positions in the stack, counted from 1, in the order in which they run; 0 for a phase.
    runs: where each run of equal blocks ends, and how many they are.
    """

    name: str
    start: float
    end: float
    first: int = 0
    last: int = 0
    runs: tuple[tuple[float, int], ...] = ()

    def edges(self) -> list[float]:
        """Where every block ends."""
        out, start = [], self.start
        for end, count in self.runs:
            out += [start + (end - start) * block / count for block in range(1, count + 1)]
            start = end
        return out


def runs_of(sweep: Sweep) -> Iterator[Run]:
    """The whole tape in order, without what stands outside it."""
    for _, group in groupby(sweep.moments(), key=lambda item: id(item[1])):
        found = list(group)
        (first, span), last = found[0], found[-1][0]
        count = last.index - first.index + 1
        if count == 1:
            yield _run(sweep, first, sweep.rows_during(first, span))
        elif first.unreleased == last.unreleased:
            yield _run(sweep, first, sweep.rows_during(first, span), last)
        else:  # the last one releases what all of them share
            yield _run(sweep, first, sweep.rows_during(first, span), last, count - 1)
            yield _run(sweep, last, sweep.rows_during(last, span))


def _run(
    sweep: Sweep, first: Moment, rows: list[list[int]], last: Moment | None = None, count: int | None = None
) -> Run:
    """A run that begins at `first`; `last` is the last of its equal blocks, of which only `count` are wanted."""
    steps = last.index - first.index if last is not None else 0
    change: Rows = (0,) * len(rows)
    if last is not None:
        ends = zip(sweep.untraced_rows(first), sweep.untraced_rows(last), strict=True)
        change = tuple((end - start) // steps for start, end in ends)
    return Run(
        first.phase,
        rows,
        first.block,
        first.position or 0,
        -1 if first.phase == "backward" else 1,
        steps + 1 if count is None else count,
        change,
        first.tick,
    )


def resampled(runs: Sequence[Run], pieces: int) -> list[Sample]:
    """The fullest moment of each of `pieces` equal pieces of the axis: together they hold every moment of the step.

    Where the step has fewer samples than pieces, some moments come more than once.
    """
    length = sum(run.length for run in runs)
    starts, start = [], 0
    for run in runs:
        starts.append(start)
        start += run.length
    out, current = [], 0
    for piece in range(pieces):
        begin, end = piece * length // pieces, max((piece + 1) * length // pieces, piece * length // pieces + 1)
        while starts[current] + runs[current].length <= begin:
            current += 1
        found, index = [], current
        while index < len(runs) and starts[index] < end:
            found.append(_fullest(runs[index], begin - starts[index], end - starts[index]))
            index += 1
        out.append(max(found, key=lambda sample: sample.total))
    return out


def _fullest(run: Run, begin: int, end: int) -> Sample:
    """The fullest moment of the part of `run` that lies within [begin, end) of its own axis."""
    if run.drawn:
        begin, end = 0, run.samples
    _, block, tick = run.highest(max(begin, 0), min(end, run.samples))
    return Sample(
        run.phase,
        run.block.stack if run.block else None,
        run.first + run.stride * block if run.block else None,
        run.block.depth if run.block else None,
        None if run.start is None else run.start + tick,
        run.rows_at(block, tick),
    )


def phases_of(runs: Sequence[Run], pieces: int) -> Iterator[Stretch]:
    """The phases in order, on an axis of `pieces`."""
    start, length = 0, sum(run.length for run in runs)
    for phase, group in groupby(runs, key=lambda run: run.phase):
        end = start + sum(run.length for run in group)
        yield Stretch(phase, start * pieces / length, end * pieces / length)
        start = end


def stacks_of(runs: Sequence[Run], pieces: int) -> Iterator[Stretch]:
    """Every pass over a stack of blocks, on an axis of `pieces`."""
    scale = pieces / sum(run.length for run in runs)
    found: Stretch | None = None
    start, before = 0, ("", "", 0)
    for run in runs:
        begin, end = start * scale, (start + run.length) * scale
        start += run.length
        if run.block is None:
            continue
        last = run.first + run.stride * (run.count - 1) + 1
        if found is not None and before == (run.phase, run.block.stack, run.first + 1):
            found = replace(found, end=end, last=last, runs=(*found.runs, (end, run.count)))
        else:
            if found is not None:
                yield found
            found = Stretch(run.block.stack, begin, end, run.first + 1, last, ((end, run.count),))
        before = run.phase, run.block.stack, last + run.stride
    if found is not None:
        yield found
