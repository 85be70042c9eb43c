"""The sweep: when is most memory in use, and what is it?

A tape holds each kind of block once. A block that it traced stands for `copies` blocks of the model; while one of
those runs, the tape's own numbers are right but for what the untraced ones have left behind so far. That is the sum
of their *net effects*: what is alive after a block's span and was not before it. Everything is exact integer
arithmetic, and costs what the kinds of blocks cost, not what their number would.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

from memcalc.model.tape import NEVER, ROWS, Allocation, Span, Tape, TracedBlock

Label = tuple[str, str]
"""Row of the box and part of that row."""

_INDEX = {row: index for index, row in enumerate(ROWS)}


@dataclass(frozen=True, slots=True)
class Moment:
    """A sample of the tape, as it is when block `position` of its stack runs (None: between blocks).

    `ghosts` says how often the net effect of each traced span has to be added for the blocks that were not traced.
    """

    phase: str
    tick: int
    block: TracedBlock | None
    position: int | None
    ghosts: tuple[tuple[Span, int], ...]


@dataclass(slots=True)
class _Region:
    """Consecutive spans of one stack in one phase, in the order in which they ran."""

    spans: list[Span] = field(default_factory=list)

    def order(self) -> list[tuple[int, Span]]:
        """Every block of the stack that these spans answer for, in the order of running, with its traced span."""
        pairs = [(position, span) for span in self.spans for position in span.block.positions]  # type: ignore[union-attr]
        return sorted(pairs, key=lambda pair: pair[0], reverse=self.spans[0].phase == "backward")


class Sweep:
    """The live bytes of a tape, sample by sample and row by row, with untraced blocks accounted for."""

    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        self.size = tape.clock
        self._regions = _find_regions(tape.spans)
        self._in_region = [(region.spans[0].start, region.spans[-1].end) for region in self._regions]
        self._received = dict(self._handed_on())
        self._shared = dict(self._shared_deaths())
        self._drops = list(self._ghost_deaths())
        self._live = self._accumulate()
        self._net = {id(span): self._net_effect(span) for region in self._regions for span in region.spans}

    # -- the tape as it is --------------------------------------------------------------------------------------------

    def _accumulate(self) -> list[list[int]]:
        """Live bytes of every row at every sample of the tape, less what dies with ghosts outside their blocks."""
        rows = [[0] * (self.size + 1) for _ in ROWS]
        for allocation in self.tape.allocations:
            row = rows[_INDEX[allocation.row]]
            row[allocation.born] += allocation.nbytes
            if allocation.dies <= self.size:
                row[allocation.dies] -= allocation.nbytes
        for allocation, count in self._drops:
            rows[_INDEX[allocation.row]][allocation.dies] -= allocation.nbytes * count
        return [list(accumulate(row)) for row in rows]

    def _ghost_deaths(self) -> Iterator[tuple[Allocation, int]]:
        """What blocks leave behind that dies between stacks (weight copies of autocast), with its untraced copies."""
        starts = [start for start, _ in self._in_region]
        for span in self.tape.spans:
            if span.block is None or span.block.copies == 1:
                continue
            for allocation in self.tape.allocations[span.start : span.end]:
                if allocation.handed_over or not span.end <= allocation.dies <= self.size:
                    continue
                index = bisect_right(starts, allocation.dies - 1) - 1
                if index < 0 or allocation.dies > self._in_region[index][1]:
                    yield allocation, span.block.copies - 1

    def _net_effect(self, span: Span) -> list[int]:
        """Bytes by row that are alive after `span` and were not before it, less those it released."""
        net = [0] * len(ROWS)
        for label, nbytes in self._changes(span):
            net[_INDEX[label[0]]] += nbytes
        return net

    def _changes(self, span: Span) -> Iterator[tuple[Label, int]]:
        """What is alive after `span` and was not before (positive), and what it released (negative).

        What a block hands to the next counts as what it received itself: of equal blocks, the last traced one may be
        followed by something that treats its output otherwise.
        """
        received = iter(self._received.get(id(span), ()))
        shared = self._shared.get(id(span), ())
        for allocation in self.tape.allocations[: span.end]:
            if allocation.born >= span.start:
                if allocation.dies > span.end:
                    if allocation.handed_over:
                        allocation = next(received, allocation)
                    yield (allocation.row, allocation.name), allocation.nbytes
            elif (
                span.start < allocation.dies <= span.end
                and allocation not in shared
                and not _outlives(allocation, span)
            ):
                yield (allocation.row, allocation.name), -allocation.nbytes

    def _handed_on(self) -> Iterator[tuple[int, list[Allocation]]]:
        """For each forward span that stands for more than one block: what the span before it handed on to it."""
        for region in self._regions:
            for before, span in pairwise(region.spans):
                if span.block is not None and span.block.copies > 1:
                    given = [a for a in self.tape.allocations[before.start : before.end] if a.handed_over]
                    own = [a for a in self.tape.allocations[span.start : span.end] if a.handed_over]
                    if [a.nbytes for a in given] == [a.nbytes for a in own]:
                        yield id(span), given

    def _shared_deaths(self) -> Iterator[tuple[int, list[Allocation]]]:
        """For each backward span that stands for more than one block: what those blocks share and it released.

        A mask or a rotary table of one kind of layer was made before the blocks. It dies once, with the last of them to
        run backward, which is the one that was traced.
        """
        first_block = min((start for start, _ in self._in_region), default=0)
        made_before = [a for a in self.tape.allocations[:first_block] if not a.handed_over]
        for region in self._regions:
            for span in region.spans:
                if span.phase == "backward" and _copies(span) > 1:
                    shared = [a for a in made_before if span.start < a.dies <= span.end]
                    if shared:
                        yield id(span), shared

    def _still_shared(self, moment: Moment, span: Span) -> list[Allocation]:
        """What the traced block released in `span`, but the block of `moment` leaves for others of its kind."""
        traced = moment.block is None or moment.position == moment.block.position
        return [] if traced else self._shared.get(id(span), [])

    # -- the model as it runs -----------------------------------------------------------------------------------------

    def moments(self) -> Iterator[tuple[Moment, Span, list[int]]]:
        """Every stretch of the step that could hold a peak, with the span to look into and the ghosts' bytes by row.

        Of a run of equal blocks only the first and the last are given: in between, every row changes linearly.
        """
        settled: list[tuple[Span, int]] = []
        offset = [0] * len(ROWS)
        spans = iter(self.tape.spans)
        regions = iter(self._regions)
        region = next(regions, None)
        for span in spans:
            if region is not None and span is region.spans[0]:
                yield from self._inside(region, settled, offset)
                for traced in region.spans:
                    count = traced.block.copies - 1  # type: ignore[union-attr]
                    settled.append((traced, count))
                    offset = [have + count * net for have, net in zip(offset, self._net[id(traced)], strict=True)]
                region = next(regions, None)
            elif span.block is None and span.end > span.start:
                yield Moment(span.phase, span.start, None, None, tuple(settled)), span, offset

    def _inside(
        self, region: _Region, settled: Sequence[tuple[Span, int]], offset: list[int]
    ) -> Iterator[tuple[Moment, Span, list[int]]]:
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
                ghosts = [(s, done[id(s)] - traced_before[id(span)].get(id(s), 0)) for s in region.spans]
                bytes_ = list(offset)
                for ghost, count in ghosts:
                    if count:
                        bytes_ = [have + count * net for have, net in zip(bytes_, self._net[id(ghost)], strict=True)]
                yield Moment(span.phase, span.start, span.block, position, (*settled, *ghosts)), span, bytes_
            done[id(span)] += 1

    def row_live(self, row: int, span: Span) -> list[int]:
        """Live bytes of a row at the samples of `span`."""
        return self._live[row][span.start : span.end]

    def peaks(self, start_phase_level: bool = True) -> tuple[dict[str, tuple[int, Moment]], dict[str, list[int]]]:
        """Per phase: the largest total with its moment, and the largest value of each row."""
        best: dict[str, tuple[int, Moment]] = {}
        rows: dict[str, list[int]] = {}
        for moment, span, ghosts in self.moments():
            if span.end == span.start:
                continue
            lives = [self.row_live(row, span) for row in range(len(ROWS))]
            for allocation in self._still_shared(moment, span):
                row, ahead = lives[_INDEX[allocation.row]], allocation.dies - span.start
                row[ahead:] = [live + allocation.nbytes for live in row[ahead:]]
            totals = [sum(values) for values in zip(*lives, strict=True)]
            highest = max(totals)
            total = highest + sum(ghosts)
            if moment.phase not in best or total > best[moment.phase][0]:
                tick = span.start + totals.index(highest)
                best[moment.phase] = (total, Moment(moment.phase, tick, moment.block, moment.position, moment.ghosts))
            maxima = [max(live) + ghost for live, ghost in zip(lives, ghosts, strict=True)]
            have = rows.get(moment.phase)
            rows[moment.phase] = maxima if have is None else [max(a, b) for a, b in zip(have, maxima, strict=True)]
        return best, rows

    def live_at(self, moment: Moment) -> dict[Label, int]:
        """What is alive at `moment`, by row and part."""
        out: dict[Label, int] = {}
        for allocation in self.tape.allocations:
            if allocation.born <= moment.tick < allocation.dies:
                label = (allocation.row, allocation.name)
                out[label] = out.get(label, 0) + allocation.nbytes
        for span, count in moment.ghosts:
            if count:
                for label, nbytes in self._changes(span):
                    out[label] = out.get(label, 0) + count * nbytes
        for span in self.tape.spans:
            if span.block is moment.block and span.start <= moment.tick < span.end:
                for allocation in self._still_shared(moment, span):
                    if allocation.dies <= moment.tick:
                        label = (allocation.row, allocation.name)
                        out[label] = out.get(label, 0) + allocation.nbytes
        for allocation, count in self._drops:
            if allocation.dies <= moment.tick:
                label = (allocation.row, allocation.name)
                out[label] = out.get(label, 0) - allocation.nbytes * count
        return {label: nbytes for label, nbytes in out.items() if nbytes}

    def saved_for_backward(self, tick: int) -> int:
        """Bytes of distinct storages that autograd keeps at `tick`, not rounded, parameters excluded."""
        copies = [1] * (self.size + 1)
        handed_on = list(copies)
        for region in self._regions:
            following = [*region.spans[1:], None]
            for span, successor in zip(region.spans, following, strict=True):
                width = span.end - span.start
                copies[span.start : span.end] = [_copies(span)] * width
                handed_on[span.start : span.end] = [_copies(successor)] * width
        kept = sum(a.raw_nbytes for a in self.tape.inputs if a.saved)
        kept += sum(a.raw_nbytes * count for a, count in self.tape.buffers if a.saved)
        for allocation in self.tape.allocations[:tick]:
            if allocation.saved and allocation.dies > tick:
                weight = handed_on if allocation.handed_over else copies
                kept += allocation.raw_nbytes * weight[allocation.born]
        return kept


def _outlives(allocation: Allocation, span: Span) -> bool:
    """Whether what seems to die with the last sample of a forward span died after it: only a block's input does not."""
    return span.phase != "backward" and allocation.dies == span.end and not allocation.handed_over


def _copies(span: Span | None) -> int:
    """How many blocks of the model a span stands for. A block's input counts with the block, not with its maker."""
    return 1 if span is None or span.block is None else span.block.copies


def _find_regions(spans: Sequence[Span]) -> list[_Region]:
    """Group the spans of blocks by stack and phase. Work between two blocks counts to the one that follows."""
    regions: list[_Region] = []
    for span in spans:
        if span.block is None:
            continue
        last = regions[-1].spans[-1] if regions else None
        if last is not None and last.block is not None and last.block.stack == span.block.stack and last.phase == span.phase:
            span.start = last.end
            regions[-1].spans.append(span)
        else:
            regions.append(_Region([span]))
    return regions


__all__ = ["NEVER", "Moment", "Sweep"]
