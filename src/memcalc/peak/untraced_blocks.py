"""Memory of repeated blocks that were not traced, extrapolated from a block that was.

A traced block stands for `copies` blocks of the model, all of its kind and with neighbours of the same kinds
(`nn/stack.py`). So each of them has the same *net effect*: bytes that are alive after the block's span and were not
before it, less the bytes that it released.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from memcalc.autograd.spans import Span, TracedBlock
from memcalc.autograd.tape import ROWS, Allocation, Tape

Label = tuple[str, str]
"""Row of the box and part of that row."""

ROW_INDEX = {row: index for index, row in enumerate(ROWS)}


class BlockSpan:
    """Ticks [start, end) of one traced block in one phase, with the work between it and the block that ran before.

    changes: what each block that it stands for leaves behind, by label; negative where more is released.
    released_once: what all these blocks share, each with a number of copies; the last of them to run releases it.
    """

    def __init__(self, block: TracedBlock, start: int, end: int) -> None:
        self.block = block
        self.start = start
        self.end = end
        self.changes: dict[Label, int] = {}
        self.released_once: list[tuple[Allocation, int]] = []

    def add(self, allocation: Allocation, sign: int) -> None:
        """Count an allocation that is left behind (sign 1) or released (sign -1)."""
        label = allocation.row, allocation.name
        self.changes[label] = self.changes.get(label, 0) + sign * allocation.nbytes

    def net(self) -> list[int]:
        """The changes by row of the box."""
        net = [0] * len(ROWS)
        for (row, _), nbytes in self.changes.items():
            net[ROW_INDEX[row]] += nbytes
        return net


class Region(NamedTuple):
    """The spans of one stack in one phase, in the order in which they ran."""

    phase: str
    spans: list[BlockSpan]

    def goes_on(self, span: Span) -> bool:
        """True if the span of a block belongs here: to the same stack and phase, and to the same pass of the model."""
        block = span.block
        same = block is not None and span.phase == self.phase and block.stack == self.spans[-1].block.stack
        return same and all(block is not other.block for other in self.spans)

    def order(self) -> list[tuple[int, BlockSpan]]:
        """Every block of the stack that these spans answer for, in the order of running, with its traced span."""
        pairs = [(position, span) for span in self.spans for position in span.block.positions]
        return sorted(pairs, key=lambda pair: pair[0], reverse=self.phase == "backward")


def stretches(spans: Sequence[Span]) -> list[Region | Span]:
    """The spans of a tape in order, those of one stack and phase put together.

    Work between two blocks counts with the one that follows.
    """
    out: list[Region | Span] = []
    between: list[Span] = []
    for span in spans:
        if span.block is None:
            between.append(span)
            continue
        last = out[-1] if out else None
        if not (isinstance(last, Region) and last.goes_on(span)):
            out += between
            last = Region(span.phase, [])
            out.append(last)
        start = last.spans[-1].end if last.spans else span.start
        last.spans.append(BlockSpan(span.block, start, span.end))
        between = []
    return out + between


class UntracedBlocks:
    """What the blocks of a tape that were not traced add to it: the changes of every span, times the copies."""

    def __init__(self, tape: Tape) -> None:
        self.stretches = stretches(tape.spans)
        self.regions = [stretch for stretch in self.stretches if isinstance(stretch, Region)]
        self.released_outside: list[tuple[Allocation, int]] = []
        """Allocations of blocks that are released outside their stack, each with its number of untraced copies."""
        self._at: list[BlockSpan | None] = [None] * (tape.clock + 1)
        for span in self._spans():
            self._at[span.start : span.end] = [span] * (span.end - span.start)
        self._backward = min((span.start for span in tape.spans if span.phase == "backward"), default=tape.clock)
        for allocation in tape.allocations:
            self._count(allocation, tape.clock)

    def _spans(self) -> Iterator[BlockSpan]:
        return (span for region in self.regions for span in region.spans)

    def copies(self, tick: int) -> int:
        """How many blocks of the model do what was traced at `tick` (1 between blocks)."""
        span = self._at[tick]
        return 1 if span is None else len(span.block.positions)

    def _count(self, allocation: Allocation, clock: int) -> None:
        """Add one allocation to the changes of the span that made it and of the one that released it."""
        maker = self._at[allocation.born]
        ends = allocation.dies <= clock
        releaser = self._at[allocation.dies - 1] if ends else None
        if maker is releaser:
            return
        if maker is not None:
            maker.add(allocation, 1)
        made = 1 if maker is None else len(maker.block.positions)
        same_stack = maker is not None and releaser is not None and maker.block.stack == releaser.block.stack
        if ends and made > 1 and not same_stack:
            self.released_outside.append((allocation, made - 1))
        if releaser is None:
            return
        if len(releaser.block.positions) > 1 and not (same_stack and self._passed_on(allocation, maker, releaser)):
            releaser.released_once.append((allocation, made))
        else:
            releaser.add(allocation, -1)

    def _passed_on(self, allocation: Allocation, maker: BlockSpan | None, releaser: BlockSpan) -> bool:
        """True if every block releases such an allocation: its own, or one that the block before made for it.

        Not so what was made in forward by one block for several (a position bias), and is released in backward.
        """
        own = maker is not None and maker.block is releaser.block
        return own or self.handed_on(allocation)

    def handed_on(self, allocation: Allocation) -> bool:
        """True if each block of a stack makes such an allocation for a neighbour, which releases it."""
        across = allocation.born < self._backward < allocation.dies
        return allocation.handed_over or not across
