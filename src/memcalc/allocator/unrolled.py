"""The events of a whole model out of a tape that holds one block of each kind.

A traced block answers for others that have neighbours of the same kinds (`nn/stack.py`): each of them makes and
releases what it does, in the same order. What a block takes over from a neighbour is matched by the order in which the
neighbour made it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

from memcalc.allocator.events import STREAM_SHIFT, WORKSPACE, Events
from memcalc.autograd.spans import Span
from memcalc.autograd.tape import Allocation, Tape
from memcalc.peak.untraced_blocks import BlockSpan, Region, UntracedBlocks

Route = tuple[int, int]
"""From which region of spans something comes, and from how many blocks before in the stack."""


class NotUniformError(Exception):
    """Blocks that one answers for do not hand the same things on: every block has to be traced."""


@dataclass(eq=False)
class _Piece:
    """A span of the tape: what every block that it answers for does there, in order.

    place: which of the traced blocks of its `stack` it is. made: ticks of the requests, each with its number in the
        span. outgoing: those among them that a neighbour frees, by region and distance.
    own, incoming, last: what is freed after a tick: what the block itself made (region, tick); what a neighbour made
        for it (route, which of them, bytes); what the last of these blocks frees for all.
    """

    region: int
    phase: str
    start: int
    end: int
    positions: list[int]
    stack: str | None = None
    place: int = 0
    made: dict[int, int] = field(default_factory=dict)
    outgoing: dict[Route, list[int]] = field(default_factory=lambda: defaultdict(list))
    own: dict[int, list[tuple[int, int]]] = field(default_factory=lambda: defaultdict(list))
    incoming: dict[int, list[tuple[Route, int, int]]] = field(default_factory=lambda: defaultdict(list))
    last: dict[int, list[tuple[_Piece, int]]] = field(default_factory=lambda: defaultdict(list))


class _Pattern(NamedTuple):
    """The events of a piece, the numbers of its own requests counted from 0.

    own, incoming: where in `codes` something of another region is freed, with that region and its number there, or as
    `_Piece.incoming` says it. gradients: which requests are gradients.
    """

    codes: list[int]
    own: list[tuple[int, int, int]]
    incoming: list[tuple[int, tuple[Route, int, int]]]
    gradients: list[int]


class Unrolled:
    """The pieces of a tape, and how they follow one another in the whole model."""

    def __init__(self, tape: Tape, gradients: Set[int]) -> None:
        """`gradients` are the identities of the allocations that outlive backward until the step's end."""
        self._tape = tape
        self._gradients = gradients
        self._untraced = UntracedBlocks(tape)
        self._order: list[tuple[_Piece, int]] = []
        """Every piece with the position of the block that runs it, in the order of running."""
        self._at: list[_Piece | None] = [None] * (tape.clock + 1)
        self._block_of: list[dict[int, _Piece]] = []
        """For each region, the piece of each position."""
        self._frees = 0
        """How many frees there are in the whole model."""
        places = _places(tape)
        for number, stretch in enumerate(self._untraced.stretches):
            self._add(number, stretch, places)
        for allocation in tape.allocations:
            if allocation.raw_nbytes > 0:
                self._place(allocation)
        self._workspaces = set(self._first_products())

    def _first_products(self) -> Iterator[int]:
        """Where each thread multiplies for the first time: that of the caller, and that of backward."""
        multiplied = self._tape.multiplied
        if forward := [tick for phase, tick in multiplied.items() if phase != "backward"]:
            yield min(forward)
        if "backward" in multiplied:
            yield multiplied["backward"]

    def _add(self, number: int, stretch: Region | Span, places: Mapping[tuple[str, int], int]) -> None:
        pieces: dict[int, _Piece] = {}
        if isinstance(stretch, Region):
            made: dict[int, _Piece] = {}
            for span in stretch.spans:
                block = span.block
                piece = self._piece(number, stretch.phase, span, block.positions)
                piece.stack, piece.place = block.stack, places[block.stack, block.position]
                made[id(span)] = piece
            for position, span in stretch.order():
                pieces[position] = made[id(span)]
                self._order.append((pieces[position], position))
        else:
            pieces[0] = self._piece(number, stretch.phase, stretch, [0])
            self._order.append((pieces[0], 0))
        self._block_of.append(pieces)

    def _piece(self, number: int, phase: str, span: Span | BlockSpan, positions: list[int]) -> _Piece:
        piece = _Piece(number, phase, span.start, span.end, positions)
        self._at[span.start : span.end] = [piece] * (span.end - span.start)
        return piece

    def _place(self, allocation: Allocation) -> None:
        """Note where an allocation is made and where it is freed."""
        maker = self._at[allocation.born]
        assert maker is not None
        maker.made[allocation.born] = len(maker.made)
        if id(allocation) in self._gradients:
            return
        dies = min(allocation.dies, self._tape.clock)  # what hangs on the loss goes with it
        releaser = self._at[dies - 1]
        assert releaser is not None
        self._frees += len(maker.positions)
        after, distance = dies - 1, releaser.place - maker.place
        same_stack = maker.stack is not None and maker.stack == releaser.stack
        if maker is releaser or (same_stack and distance == 0):
            releaser.own[after].append((maker.region, allocation.born))
        elif same_stack and self._untraced.handed_on(allocation):
            outgoing = maker.outgoing[releaser.region, distance]
            releaser.incoming[after].append(((maker.region, distance), len(outgoing), allocation.raw_nbytes))
            outgoing.append(allocation.born)
        else:
            releaser.last[after].append((maker, allocation.born))

    # -- events -------------------------------------------------------------------------------------------------------

    def append_to(
        self, events: Events, *, warm: bool = False, scalars: Mapping[str, int] = MappingProxyType({})
    ) -> list[int]:
        """Write the events of the tape; returns the numbers of gradients, which the step's end frees.

        `warm` says that cuBLAS has its workspaces. `scalars` are how many tensors of one element the loop makes as a
        phase begins; they go with the gradients. Raises NotUniformError.
        """
        first: dict[tuple[int, int], int] = {}  # the number of the first request of a piece, by region and position
        remaining = {id(piece): len(piece.positions) for piece, _ in self._order}
        allocations = self._tape.allocations
        workspaces = set[int]() if warm else set(self._workspaces)
        patterns: dict[int, _Pattern] = {}
        gradients: list[int] = []
        codes = events.codes
        for piece, position in self._order:
            if events.begin(piece.phase):
                gradients += [events.malloc(1) for _ in range(scalars.get(piece.phase, 0))]
            base = first[piece.region, position] = events.count
            remaining[id(piece)] -= 1
            done = len(piece.positions) - remaining[id(piece)]
            if 1 < done < len(piece.positions):  # neither multiplies for the first time nor frees for all
                if id(piece) not in patterns:
                    patterns[id(piece)] = self._pattern(piece)
                pattern, start = patterns[id(piece)], len(codes)
                codes += [code if code > 0 else code - base for code in pattern.codes]
                for at, region, made in pattern.own:
                    codes[start + at] = ~(first[region, position] + made)
                for at, (route, index, nbytes) in pattern.incoming:
                    codes[start + at] = ~self._taken_over(first, piece, position, route, index, nbytes)
                gradients += [base + made for made in pattern.gradients]
                events.count += len(piece.made)
                continue
            for tick in range(piece.start, piece.end):
                allocation = allocations[tick]
                if allocation.raw_nbytes > 0:
                    if id(allocation) in self._gradients:
                        gradients.append(base + piece.made[tick])
                    codes.append(allocation.raw_nbytes | allocation.stream << STREAM_SHIFT)
                if tick in workspaces:
                    codes.append(WORKSPACE)
                    workspaces.remove(tick)
                for region, born in piece.own.get(tick, ()):
                    made = self._block_of[region][position].made[born]
                    codes.append(~(first[region, position] + made))
                for route, index, nbytes in piece.incoming.get(tick, ()):
                    codes.append(~self._taken_over(first, piece, position, route, index, nbytes))
                if not remaining[id(piece)]:
                    for maker, born in piece.last.get(tick, ()):
                        codes += [~(first[maker.region, at] + maker.made[born]) for at in maker.positions]
            events.count += len(piece.made)
        return gradients

    def _pattern(self, piece: _Piece) -> _Pattern:
        """What every block of a piece does but the first and the last."""
        pattern = _Pattern([], [], [], [])
        codes = pattern.codes
        for tick in range(piece.start, piece.end):
            allocation = self._tape.allocations[tick]
            if allocation.raw_nbytes > 0:
                if id(allocation) in self._gradients:
                    pattern.gradients.append(piece.made[tick])
                codes.append(allocation.raw_nbytes)
            for region, born in piece.own.get(tick, ()):
                made = self._block_of[region][piece.positions[0]].made[born]
                if region != piece.region:
                    pattern.own.append((len(codes), region, made))
                codes.append(~made)
            for taken in piece.incoming.get(tick, ()):
                pattern.incoming.append((len(codes), taken))
                codes.append(-1)
        return pattern

    def _taken_over(
        self, first: Mapping[tuple[int, int], int], piece: _Piece, position: int, route: Route, index: int, nbytes: int
    ) -> int:
        """The number of what a neighbour of a block made for it."""
        region, distance = route
        neighbour = position - distance
        maker = self._block_of[region].get(neighbour)
        outgoing = [] if maker is None else maker.outgoing.get((piece.region, distance), [])
        if maker is None or index >= len(outgoing) or self._tape.allocations[outgoing[index]].raw_nbytes != nbytes:
            raise NotUniformError
        return first[region, neighbour] + maker.made[outgoing[index]]


def _places(tape: Tape) -> dict[tuple[str, int], int]:
    """For each traced block, by stack and position: which of the traced blocks of its stack it is."""
    positions: dict[str, set[int]] = {}
    for span in tape.spans:
        if span.block is not None:
            positions.setdefault(span.block.stack, set()).add(span.block.position)
    return {(stack, at): place for stack, found in positions.items() for place, at in enumerate(sorted(found))}
