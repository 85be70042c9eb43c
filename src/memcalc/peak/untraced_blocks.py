"""Memory of repeated blocks that were not traced, extrapolated from the one block of their kind that was.

A traced block stands for `copies` blocks of the model. Each of them has the same *net effect*: bytes that are alive
after the block's span and were not before it, less the bytes that it released.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import pairwise

from memcalc.autograd.tape import ROWS, Allocation, Span, Tape

Label = tuple[str, str]
"""Row of the box and part of that row."""

ROW_INDEX = {row: index for index, row in enumerate(ROWS)}


class Region:
    """Consecutive spans of one stack in one phase, in the order in which they ran."""

    def __init__(self, spans: list[Span]) -> None:
        self.spans = spans

    def order(self) -> list[tuple[int, Span]]:
        """Every block of the stack that these spans answer for, in the order of running, with its traced span."""
        pairs = [(position, span) for span in self.spans for position in span.block.positions]  # type: ignore[union-attr]
        return sorted(pairs, key=lambda pair: pair[0], reverse=self.spans[0].phase == "backward")


class UntracedBlocks:
    """The net effects of a tape's traced spans, to be added once for every untraced block."""

    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        self.regions = find_regions(tape.spans)
        self._bounds = [(region.spans[0].start, region.spans[-1].end) for region in self.regions]
        self._backward = min((span.start for span in tape.spans if span.phase == "backward"), default=tape.clock)
        self._received = dict(self._received_from_previous())
        self.released_once = dict(self._released_once())
        """By backward span: allocations that all its blocks share. They are released once, by the last block."""
        self.released_between_stacks = list(self._released_between_stacks())
        """Allocations of blocks that are released between stacks, each with its number of untraced copies."""
        self._net = {id(span): self._net_effect(span) for region in self.regions for span in region.spans}

    def net(self, span: Span) -> list[int]:
        """Bytes by row that are alive after `span` and were not before it, less those it released."""
        return self._net[id(span)]

    def within_stack(self, span: Span) -> bool:
        """True if a span between two blocks belongs to a stack: its work counts with the block that follows."""
        return any(start <= span.start and span.end <= end for start, end in self._bounds)

    def _released_between_stacks(self) -> Iterator[tuple[Allocation, int]]:
        """Allocations of blocks that are released between stacks, each with its number of untraced copies.

        These are weight copies of autocast, and inputs of blocks that are returned as hidden states.
        """
        starts = [start for start, _ in self._bounds]
        for span in self.tape.spans:
            if span.block is None or span.block.copies == 1:
                continue
            for allocation in self._received.get(id(span), ()):
                if self._between(starts, span, allocation) and allocation.dies < self._backward:
                    yield allocation, span.block.copies - 1
            for allocation in self.tape.allocations[span.start : span.end]:
                if not allocation.handed_over and self._between(starts, span, allocation):
                    yield allocation, span.block.copies - 1

    def _between(self, starts: Sequence[int], span: Span, allocation: Allocation) -> bool:
        """True if an allocation is released after `span` and between stacks."""
        if not span.end <= allocation.dies <= self.tape.clock:
            return False
        index = bisect_right(starts, allocation.dies - 1) - 1
        return index < 0 or allocation.dies > self._bounds[index][1]

    def _net_effect(self, span: Span) -> list[int]:
        net = [0] * len(ROWS)
        for label, nbytes in self.changes(span):
            net[ROW_INDEX[label[0]]] += nbytes
        return net

    def changes(self, span: Span) -> Iterator[tuple[Label, int]]:
        """What is alive after `span` and was not before (positive), and what it released (negative).

        A block's output is counted with the size of its input, because the code after the last traced block may treat
        its output differently.
        """
        received = iter(self._received.get(id(span), ()))
        shared = self.released_once.get(id(span), ())
        made, released = [], []
        for allocation in self.tape.allocations[: span.end]:
            if allocation.born >= span.start:
                if allocation.dies > span.end:
                    made.append(next(received, allocation) if allocation.handed_over else allocation)
            elif (
                span.start < allocation.dies <= span.end
                and allocation not in shared
                and not _outlives(allocation, span)
            ):
                released.append(allocation)
        self._cancel_passed_on(span, made, released)
        yield from (((allocation.row, allocation.name), allocation.nbytes) for allocation in made)
        yield from (((allocation.row, allocation.name), -allocation.nbytes) for allocation in released)

    def _cancel_passed_on(self, span: Span, made: list[Allocation], released: list[Allocation]) -> None:
        """Remove from both lists what one block makes and the next releases.

        A block receives a gradient (backward) or leaves a tensor such as eager attention's probabilities (forward) that
        the next block frees: such a pair cancels. In forward, what was received is removed even without a partner: the
        block before may be of another kind, which leaves one.
        """
        if copies(span) == 1:
            return
        backward = span.phase == "backward"
        first = self._backward if backward else max(start for start, _ in self._bounds if start <= span.start)
        for got in [a for a in released if a.born >= first and not a.communicated]:
            alike = (
                a
                for a in made
                if not a.communicated
                and a.nbytes == got.nbytes
                and a.handed_over == got.handed_over
                and (not backward or a.row == got.row)
            )
            if (given := next(alike, None)) is not None:
                made.remove(given)
            if given is not None or not backward:
                released.remove(got)

    def _received_from_previous(self) -> Iterator[tuple[int, list[Allocation]]]:
        """For each forward span that stands for more than one block: the outputs of the span before it."""
        for region in self.regions:
            for before, span in pairwise(region.spans):
                if span.block is not None and span.block.copies > 1:
                    given = [a for a in self.tape.allocations[before.start : before.end] if a.handed_over]
                    own = [a for a in self.tape.allocations[span.start : span.end] if a.handed_over]
                    if [a.nbytes for a in given] == [a.nbytes for a in own]:
                        yield id(span), given

    def _released_once(self) -> Iterator[tuple[int, list[Allocation]]]:
        """For each backward span that stands for more than one block: what it released and those blocks share.

        A mask or a rotary table of one kind of layer was made before the stack, a position bias by its first block. It
        dies once, with the last of them to run backward, which is the one that was traced.
        """
        forward = [span for region in self.regions for span in region.spans if span.phase != "backward"]
        made = [a for a in self.tape.allocations[: self._backward] if not (a.handed_over or a.communicated)]
        for region in self.regions:
            for span in region.spans:
                if span.phase == "backward" and copies(span) > 1:
                    own = [(other.start, other.end) for other in forward if other.block is span.block]
                    shared = [
                        a
                        for a in made
                        if span.start < a.dies <= span.end and not any(start <= a.born < end for start, end in own)
                    ]
                    if shared:
                        yield id(span), shared


def _outlives(allocation: Allocation, span: Span) -> bool:
    """True if this allocation was still alive when the span ended.

    Frees are recorded at the last allocation's tick, so anything but a block's input that seems to die at `span.end`
    really died after it.
    """
    return span.phase != "backward" and allocation.dies == span.end and not allocation.handed_over


def copies(span: Span | None) -> int:
    """How many blocks of the model a span stands for (1 between blocks)."""
    return 1 if span is None or span.block is None else span.block.copies


def find_regions(spans: Sequence[Span]) -> list[Region]:
    """Group the spans of blocks by stack and phase. Work between two blocks counts with the one that follows."""
    regions: list[Region] = []
    for span in spans:
        if span.block is None:
            continue
        last = regions[-1].spans[-1] if regions else None
        if (
            last is not None
            and last.block is not None
            and last.block.stack == span.block.stack
            and last.phase == span.phase
            and all(span.block is not other.block for other in regions[-1].spans)  # else a second pass of the model
        ):
            span.start = last.end
            regions[-1].spans.append(span)
        else:
            regions.append(Region([span]))
    return regions
