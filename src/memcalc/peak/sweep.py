"""The sweep: when is most memory in use, and what is it?

The tape holds one block of each kind. While another block of the model runs, live bytes are the tape's own plus the
net effects of the untraced blocks that ran before it (`untraced_blocks.py`). Everything is exact integer arithmetic,
and its cost grows with the kinds of blocks, not with their number.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate

from memcalc.autograd.tape import ROWS, Allocation, Span, Tape, TracedBlock
from memcalc.peak.untraced_blocks import ROW_INDEX, Label, Region, UntracedBlocks, copies


@dataclass(frozen=True)
class Moment:
    """A sample of the tape while block `position` of its stack runs (None: between blocks).

    `untraced_counts` pairs each traced span with the number of untraced blocks whose net effect is to be added.
    """

    phase: str
    tick: int
    block: TracedBlock | None
    position: int | None
    untraced_counts: tuple[tuple[Span, int], ...]


class Sweep:
    """The live bytes of a tape, sample by sample and row by row, with untraced blocks accounted for."""

    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        self.size = tape.clock
        self._untraced = UntracedBlocks(tape)
        self._live = self._accumulate()
        self._tops: dict[int, tuple[int, int, list[int]]] = {}

    def _accumulate(self) -> list[list[int]]:
        """Live bytes of every row at every sample of the tape, less what untraced blocks release between stacks."""
        rows = [[0] * (self.size + 1) for _ in ROWS]
        for allocation in self.tape.allocations:
            row = rows[ROW_INDEX[allocation.row]]
            row[allocation.born] += allocation.nbytes
            if allocation.dies <= self.size:
                row[allocation.dies] -= allocation.nbytes
        for allocation, count in self._untraced.released_between_stacks:
            rows[ROW_INDEX[allocation.row]][allocation.dies] -= allocation.nbytes * count
        return [list(accumulate(row)) for row in rows]

    def moments(self) -> Iterator[tuple[Moment, Span, list[int]]]:
        """Every stretch of the step that could hold a peak, with its span and the bytes by row of untraced blocks.

        Of a run of equal blocks only the first and the last are given: in between, every row changes linearly.
        """
        settled: list[tuple[Span, int]] = []
        offset = [0] * len(ROWS)
        spans = iter(self.tape.spans)
        regions = iter(self._untraced.regions)
        region = next(regions, None)
        for span in spans:
            if region is not None and span is region.spans[0]:
                yield from self._inside(region, settled, offset)
                for traced in region.spans:
                    count = traced.block.copies - 1  # type: ignore[union-attr]
                    if not count:
                        continue
                    settled.append((traced, count))
                    offset = [have + count * net for have, net in zip(offset, self._untraced.net(traced), strict=True)]
                region = next(regions, None)
            elif span.block is None and span.end > span.start and not self._untraced.within_stack(span):
                yield Moment(span.phase, span.start, None, None, tuple(settled)), span, offset

    def _inside(
        self, region: Region, settled: Sequence[tuple[Span, int]], offset: list[int]
    ) -> Iterator[tuple[Moment, Span, list[int]]]:
        if all(copies(span) == 1 for span in region.spans):  # every block was traced
            for span in region.spans:
                assert span.block is not None
                yield (
                    Moment(span.phase, span.start, span.block, span.block.position, tuple(settled)),
                    span,
                    list(offset),
                )
            return
        before: dict[int, int] = {}
        traced_before: dict[int, dict[int, int]] = {}
        for span in region.spans:
            traced_before[id(span)] = dict(before)
            before[id(span)] = 1
        done = {id(span): 0 for span in region.spans}
        order = region.order()
        for index, (position, span) in enumerate(order):
            first = index == 0 or order[index - 1][1] is not span
            last = index == len(order) - 1 or order[index + 1][1] is not span
            if first or last:
                counts = [(s, done[id(s)] - traced_before[id(span)].get(id(s), 0)) for s in region.spans]
                bytes_ = list(offset)
                for traced, count in counts:
                    if count:
                        bytes_ = [
                            have + count * net for have, net in zip(bytes_, self._untraced.net(traced), strict=True)
                        ]
                yield Moment(span.phase, span.start, span.block, position, (*settled, *counts)), span, bytes_
            done[id(span)] += 1

    def peaks(self) -> tuple[dict[str, tuple[int, Moment]], dict[str, list[int]]]:
        """Per phase: the largest total with its moment, and the largest value of each row."""
        best: dict[str, tuple[int, Moment]] = {}
        rows: dict[str, list[int]] = {}
        for moment, span, untraced in self.moments():
            if span.end == span.start:
                continue
            highest, tick, tops = self._top(moment, span)
            total = highest + sum(untraced)
            if moment.phase not in best or total > best[moment.phase][0]:
                best[moment.phase] = total, replace(moment, tick=tick)
            maxima = [top + extra for top, extra in zip(tops, untraced, strict=True)]
            have = rows.get(moment.phase)
            rows[moment.phase] = maxima if have is None else [max(a, b) for a, b in zip(have, maxima, strict=True)]
        return best, rows

    def _top(self, moment: Moment, span: Span) -> tuple[int, int, list[int]]:
        """The largest total of the tape within `span`, its tick, and the largest value of each row."""
        left = self._left_alive(moment, span)
        known = self._tops.get(id(span))
        if known is not None and not left:
            return known
        lives = [row[span.start : span.end] for row in self._live]
        for allocation in left:
            row, ahead = lives[ROW_INDEX[allocation.row]], allocation.dies - span.start
            row[ahead:] = [live + allocation.nbytes for live in row[ahead:]]
        totals = [sum(values) for values in zip(*lives, strict=True)]
        highest = max(totals)
        top = highest, span.start + totals.index(highest), [max(live) for live in lives]
        if not left:
            self._tops[id(span)] = top
        return top

    def _left_alive(self, moment: Moment, span: Span) -> list[Allocation]:
        """What the traced block released in `span`, but the block of `moment` leaves for others of its kind."""
        traced = moment.block is None or moment.position == moment.block.position
        return [] if traced else self._untraced.released_once.get(id(span), [])

    def live_at(self, moment: Moment) -> dict[Label, int]:
        """What is alive at `moment`, by row and part."""
        out: dict[Label, int] = {}
        for allocation in self.tape.allocations:
            if allocation.born <= moment.tick < allocation.dies:
                label = (allocation.row, allocation.name)
                out[label] = out.get(label, 0) + allocation.nbytes
        for span, count in moment.untraced_counts:
            if count:
                for label, nbytes in self._untraced.changes(span):
                    out[label] = out.get(label, 0) + count * nbytes
        for span in self.tape.spans:
            if span.block is moment.block and span.start <= moment.tick < span.end:
                for allocation in self._left_alive(moment, span):
                    if allocation.dies <= moment.tick:
                        label = (allocation.row, allocation.name)
                        out[label] = out.get(label, 0) + allocation.nbytes
        for allocation, count in self._untraced.released_between_stacks:
            if allocation.dies <= moment.tick:
                label = (allocation.row, allocation.name)
                out[label] = out.get(label, 0) - allocation.nbytes * count
        return {label: nbytes for label, nbytes in out.items() if nbytes}

    def saved_for_backward(self, tick: int) -> int:
        """Bytes of distinct storages that autograd keeps at `tick`, not rounded, parameters excluded."""
        stands_for = [1] * (self.size + 1)
        handed_on = list(stands_for)
        for region in self._untraced.regions:
            following = [*region.spans[1:], None]
            for span, successor in zip(region.spans, following, strict=True):
                width = span.end - span.start
                stands_for[span.start : span.end] = [copies(span)] * width
                handed_on[span.start : span.end] = [copies(successor)] * width
        kept = sum(a.raw_nbytes for a in self.tape.inputs if a.saved)
        kept += sum(a.raw_nbytes * count for a, count in self.tape.buffers if a.saved)
        for allocation in self.tape.allocations[:tick]:
            if allocation.saved and allocation.dies > tick:
                weight = handed_on if allocation.handed_over else stands_for
                kept += allocation.raw_nbytes * weight[allocation.born]
        return kept


@lru_cache(maxsize=64)
def swept(tape: Tape) -> tuple[Sweep, dict[str, tuple[int, Moment]], dict[str, list[int]]]:
    """The sweep of a tape, with the peak of each phase and the maximum of each row."""
    sweep = Sweep(tape)
    return sweep, *sweep.peaks()
