"""Blocks and pools: how the allocator cuts segments of device memory up, and where it keeps the free pieces."""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memcalc.allocator.expandable import ExpandableSegment

_ADDRESS_BITS = 50
_SIZE_BITS = 50
_ADDRESS = (1 << _ADDRESS_BITS) - 1


class Block:
    """A piece of a segment, `size` bytes at `address` for one stream, with its neighbours in the segment.

    `busy` says that it is allocated, or that work on another stream may still use it; `requested` is what was asked
    for. `mapped` is False for address space of an expandable segment without memory behind it.
    """

    __slots__ = (
        "address",
        "busy",
        "cached_at",
        "mapped",
        "next",
        "pool",
        "prev",
        "requested",
        "segment",
        "size",
        "stream",
        "used_by",
    )

    def __init__(self, pool: Pool, stream: int, address: int, size: int) -> None:
        self.pool = pool
        self.stream = stream
        self.address = address
        self.size = size
        self.requested = 0
        self.busy = False
        self.used_by: set[int] | None = None
        """Other streams that use it, where there are any."""
        self.prev: Block | None = None
        self.next: Block | None = None
        self.mapped = True
        self.segment: ExpandableSegment | None = None
        self.cached_at = 0
        """How often the pool had been searched when the block was put into it."""

    @property
    def whole(self) -> bool:
        """Whether the block is its whole segment."""
        return self.prev is None and self.next is None


class Pool:
    """The free blocks of one kind of segment: of at most 1 MiB (`small`), or larger.

    They are in order of stream, size and address, which is the order in which they are given out.
    """

    __slots__ = ("blocks", "keys", "searches", "small", "unmapped")

    def __init__(self, small: bool) -> None:
        self.small = small
        self.keys: list[int] = []
        self.blocks: dict[int, Block] = {}
        """The free blocks by address."""
        self.unmapped: dict[int, Block] = {}
        """Address space without memory behind it, by address."""
        self.searches = 0
        """How often a block was looked for; counted only where garbage is collected."""

    def insert(self, block: Block) -> None:
        """Keep a free block."""
        block.cached_at = self.searches
        insort(self.keys, _key(block.stream, block.size) | block.address)
        self.blocks[block.address] = block

    def remove(self, block: Block) -> None:
        """Take a free block out."""
        del self.keys[bisect_left(self.keys, _key(block.stream, block.size) | block.address)]
        del self.blocks[block.address]

    def search(self, stream: int, size: int) -> int:
        """Index of the first free block of a stream that holds `size` bytes, or of what stands behind all of those."""
        return bisect_left(self.keys, _key(stream, size))

    def at(self, index: int) -> Block:
        """The free block at an index of the order."""
        return self.blocks[self.keys[index] & _ADDRESS]

    def free_blocks(self) -> list[Block]:
        """All free blocks."""
        return [self.blocks[key & _ADDRESS] for key in self.keys]


def _key(stream: int, size: int) -> int:
    return (stream << _SIZE_BITS | size) << _ADDRESS_BITS


def splice(block: Block, before: Block | None, after: Block | None) -> None:
    """Put `block` between two neighbours of its segment."""
    block.prev, block.next = before, after
    if before is not None:
        before.next = block
    if after is not None:
        after.prev = block


def merge(block: Block, neighbour: Block) -> None:
    """Let `block` take the place of a free neighbour too."""
    if block.prev is neighbour:
        block.address = neighbour.address
        block.prev = neighbour.prev
        if block.prev is not None:
            block.prev.next = block
    else:
        block.next = neighbour.next
        if block.next is not None:
            block.next.prev = block
    block.size += neighbour.size
