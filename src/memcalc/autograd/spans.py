"""What runs while a tape records: a block of a stack in a span of ticks, and one of the GPUs that share a sequence."""

from __future__ import annotations

from dataclasses import dataclass


class Span:
    """Ticks [start, end) in which one traced block ran, forward or backward. `block` is None between blocks."""

    __slots__ = ("block", "end", "phase", "start")

    def __init__(self, phase: str, block: TracedBlock | None, start: int) -> None:
        self.phase = phase
        self.block = block
        self.start = start
        self.end = start


class TracedBlock:
    """A block of a stack that was really traced, and the positions in the stack that it answers for."""

    __slots__ = ("depth", "kind", "position", "positions", "stack")

    def __init__(self, stack: str, depth: int, kind: object, position: int, positions: list[int]) -> None:
        self.stack = stack
        self.depth = depth
        self.kind = kind
        self.position = position
        self.positions = positions

    @property
    def copies(self) -> int:
        """How many blocks of the model this one stands for, itself included."""
        return len(self.positions)


@dataclass(frozen=True)
class Ring:
    """GPUs that share every sequence: how many, which one this is, whether keys and values are gathered at once or
    passed on one by one, and whether heads are exchanged instead (DeepSpeed-Ulysses)."""

    ranks: int
    rank: int
    gathers: bool
    exchanges_heads: bool = False
