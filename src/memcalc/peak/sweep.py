"""The sweep: when is most memory in use, and what is it?

The tape holds one block of each kind. While another block of the model runs, live bytes are the tape's own plus the
net effects of the untraced blocks that ran before it (`untraced_blocks.py`). Everything is exact integer arithmetic,
and its cost grows with the kinds of blocks, not with their number.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from operator import add

from memcalc.autograd.spans import Span, TracedBlock
from memcalc.autograd.tape import ROWS, Allocation, Tape
from memcalc.peak.untraced_blocks import ROW_INDEX, BlockSpan, Label, Region, UntracedBlocks


@dataclass(frozen=True)
class Moment:
    """A sample of the tape while block `position` of its stack runs (None: between blocks).

    untraced: labels with the bytes that untraced blocks add to those that are alive at that sample of the tape.
    unreleased: what the traced block releases in its span, but the block of this moment does not.
    index: how many blocks of the stack ran before, in this phase.
    """

    phase: str
    tick: int
    block: TracedBlock | None
    position: int | None
    untraced: Mapping[Label, int]
    unreleased: Sequence[tuple[Allocation, int]] = ()
    index: int = 0


class Sweep:
    """The live bytes of a tape, sample by sample and row by row, with untraced blocks accounted for."""

    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        self.size = tape.clock
        self._untraced = UntracedBlocks(tape)
        self._live = self._accumulate()
        self._tops: dict[int, tuple[int, int, list[int]]] = {}

    def _accumulate(self) -> list[list[int]]:
        """Live bytes of every row at every sample of the tape, less what untraced blocks release outside stacks."""
        rows = [[0] * (self.size + 1) for _ in ROWS]
        for allocation in self.tape.allocations:
            row = rows[ROW_INDEX[allocation.row]]
            row[allocation.born] += allocation.nbytes
            if allocation.dies <= self.size:
                row[allocation.dies] -= allocation.nbytes
        for allocation, count in self._untraced.released_outside:
            rows[ROW_INDEX[allocation.row]][allocation.dies] -= allocation.nbytes * count
        return [list(accumulate(row)) for row in rows]

    def moments(self) -> Iterator[tuple[Moment, Span | BlockSpan]]:
        """Every stretch of the step that could hold a peak, with its span.

        Of a run of equal blocks only the first and the last are given: in between, every row changes linearly.
        """
        settled: dict[Label, int] = {}
        for stretch in self._untraced.stretches:
            if isinstance(stretch, Region):
                yield from self._inside(stretch, settled)
                for span in stretch.spans:
                    settled = _plus(settled, span.changes, len(span.block.positions) - 1)
            elif stretch.end > stretch.start:
                yield Moment(stretch.phase, stretch.start, None, None, settled), stretch

    def _inside(self, region: Region, settled: Mapping[Label, int]) -> Iterator[tuple[Moment, BlockSpan]]:
        done = dict.fromkeys(map(id, region.spans), 0)
        order = region.order()
        for index, (position, span) in enumerate(order):
            first = index == 0 or order[index - 1][1] is not span
            last = index == len(order) - 1 or order[index + 1][1] is not span
            if (first or last) and span.end > span.start:
                ends_here = done[id(span)] + 1 == len(span.block.positions)
                untraced = self._extra(region, span, done, settled)
                unreleased = () if ends_here else span.released_once
                yield Moment(region.phase, span.start, span.block, position, untraced, unreleased, index), span
            done[id(span)] += 1

    def _extra(
        self, region: Region, current: BlockSpan, done: Mapping[int, int], settled: Mapping[Label, int]
    ) -> dict[Label, int]:
        """What untraced blocks add while a block that `current` stands for runs, after as many others as are `done`."""
        extra = dict(settled)
        traced = 1  # those before `current` ran on the tape
        for span in region.spans:
            if span is current:
                traced = 0
            count = done[id(span)] - traced
            if count:
                extra = _plus(extra, span.changes, count)
            if span.released_once and span is not current:
                released = int(done[id(span)] == len(span.block.positions)) - traced
                for allocation, copies in span.released_once:
                    label = allocation.row, allocation.name
                    extra[label] = extra.get(label, 0) - released * copies * allocation.nbytes
        return extra

    def peaks(self) -> tuple[dict[str, tuple[int, Moment]], dict[str, list[int]]]:
        """Per phase: the largest total with its moment, and the largest value of each row."""
        best: dict[str, tuple[int, Moment]] = {}
        rows: dict[str, list[int]] = {}
        for moment, span in self.moments():
            highest, tick, tops = self._top(moment, span)
            total = highest + sum(moment.untraced.values())
            if moment.phase not in best or total > best[moment.phase][0]:
                best[moment.phase] = total, replace(moment, tick=tick)
            tops = list(map(add, tops, self.untraced_rows(moment)))
            have = rows.setdefault(moment.phase, tops)
            rows[moment.phase] = list(map(max, have, tops))
        return best, rows

    def _top(self, moment: Moment, span: Span | BlockSpan) -> tuple[int, int, list[int]]:
        """The largest total of the tape within `span`, its tick, and the largest value of each row."""
        known = self._tops.get(span.start)
        if known is not None and not moment.unreleased:
            return known[0], known[1], list(known[2])
        lives = self._on_tape(moment, span)
        totals = [sum(values) for values in zip(*lives, strict=True)]
        highest = max(totals)
        top = highest, span.start + totals.index(highest), [max(live) for live in lives]
        if not moment.unreleased:
            self._tops[span.start] = top
        return top[0], top[1], list(top[2])

    def _on_tape(self, moment: Moment, span: Span | BlockSpan) -> list[list[int]]:
        """What the tape holds in each row at every tick of `span`, as it is for the block of `moment`."""
        lives = [row[span.start : span.end] for row in self._live]
        for allocation, copies in moment.unreleased:
            row, ahead = lives[ROW_INDEX[allocation.row]], allocation.dies - span.start
            row[ahead:] = [live + allocation.nbytes * copies for live in row[ahead:]]
        return lives

    def untraced_rows(self, moment: Moment) -> list[int]:
        """What untraced blocks add to each row at `moment`."""
        added = [0] * len(ROWS)
        for (row, _), nbytes in moment.untraced.items():
            added[ROW_INDEX[row]] += nbytes
        return added

    def rows_during(self, moment: Moment, span: Span | BlockSpan) -> list[list[int]]:
        """Live bytes of every row at every tick of `span`, untraced blocks included."""
        added = self.untraced_rows(moment)
        return [[live + more for live in lives] for lives, more in zip(self._on_tape(moment, span), added, strict=True)]

    def live_at(self, moment: Moment) -> dict[Label, int]:
        """What is alive at `moment`, by row and part."""
        out = dict(moment.untraced)
        released = [(a, -count) for a, count in self._untraced.released_outside if a.dies <= moment.tick]
        unreleased = [(a, count) for a, count in moment.unreleased if a.dies <= moment.tick]
        live = [(a, 1) for a in self.tape.allocations if a.born <= moment.tick < a.dies]
        for allocation, count in (*live, *released, *unreleased):
            label = (allocation.row, allocation.name)
            out[label] = out.get(label, 0) + count * allocation.nbytes
        return {label: nbytes for label, nbytes in out.items() if nbytes}

    def saved_for_backward(self, tick: int) -> int:
        """Bytes of distinct storages that autograd keeps at `tick`, not rounded, parameters excluded."""
        kept = sum(a.raw_nbytes for a in self.tape.inputs if a.saved)
        kept += sum(a.raw_nbytes * count for a, count in self.tape.buffers if a.saved)
        return kept + sum(
            allocation.raw_nbytes * self._untraced.copies(allocation.born)
            for allocation in self.tape.allocations[:tick]
            if allocation.saved and allocation.dies > tick
        )


def _plus(labels: Mapping[Label, int], changes: Mapping[Label, int], count: int) -> dict[Label, int]:
    """Labels with `changes` added `count` times."""
    out = dict(labels)
    for label, nbytes in changes.items():
        out[label] = out.get(label, 0) + count * nbytes
    return out


@lru_cache(maxsize=64)
def swept(tape: Tape) -> tuple[Sweep, dict[str, tuple[int, Moment]], dict[str, list[int]]]:
    """The sweep of a tape, with the peak of each phase and the maximum of each row."""
    sweep = Sweep(tape)
    return sweep, *sweep.peaks()
