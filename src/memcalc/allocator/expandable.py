"""The allocator with `expandable_segments:True`: one segment for each pool of a stream, which grows in pages.

Source: c10/cuda/CUDACachingAllocator.cpp of PyTorch 2.14. A segment is address space as large as the device and an
eighth more; memory is put behind it in pages of 2 MiB for small requests and of 20 MiB for larger ones, at the lowest
address where the request fits. Pages that nothing uses go back when the device is full.
"""

from __future__ import annotations

from memcalc.allocator.blocks import Block, Pool, merge, splice
from memcalc.allocator.caching import SMALL_SEGMENT, CachingAllocator
from memcalc.allocator.conf import AllocatorConf
from memcalc.common.sizes import ALIGNMENT

_UNLIMITED = 2**40
"""Memory of a device without a stated capacity, bytes: it decides only where an expandable segment ends."""


class ExpandableSegment:
    """Address space with pages of `page` bytes, some of them mapped."""

    __slots__ = ("address", "page", "size")

    def __init__(self, address: int, page: int, size: int) -> None:
        self.address = address
        self.page = page
        self.size = -(-size // page) * page

    def inner(self, block: Block) -> tuple[int, int]:
        """First and last address of the pages that lie wholly inside a block."""
        start = -(-(block.address - self.address) // self.page) * self.page
        end = (block.address - self.address + block.size) // self.page * self.page
        return self.address + start, self.address + max(end, start)


class ExpandableAllocator(CachingAllocator):
    """PyTorch's allocator with expandable segments."""

    def __init__(self, conf: AllocatorConf, capacity: int | None = None, memory_fraction: float | None = None) -> None:
        super().__init__(conf, capacity, memory_fraction)
        memory = _UNLIMITED if capacity is None else capacity
        self._space = memory + memory // 8

    def _cached(self, pool: Pool, stream: int, size: int) -> Block | None:
        """The best fit, where the last block of a segment counts as large as it can become."""
        if self.collects:
            pool.searches += 1
        keys = pool.keys
        index = pool.search(stream, size)
        if index == len(keys):
            return None
        found = pool.at(index)
        if found.stream != stream:
            return None
        while index + 1 < len(keys):
            following = pool.at(index + 1)
            if following.stream != stream or _size_when_grown(following) >= _size_when_grown(found):
                break
            index, found = index + 1, following
        if self._max_split is not None:
            if size < self._max_split <= found.size:
                return None
            if size >= self._max_split and found.size >= size + self.conf.max_non_split_rounding:
                return None
        del keys[index]
        del pool.blocks[found.address]
        return found

    def _splits(self, pool: Pool, size: int, left: int) -> bool:
        return left >= ALIGNMENT

    def _new_block(self, pool: Pool, stream: int, size: int, length: int) -> Block | None:
        if self.allowed is not None and self.reserved + length > self.allowed:
            return None
        block = self._room(pool, stream, size)
        if not block.mapped and not self._map(block, min(block.size, size)):
            return None
        while block.size < size:
            following = block.next
            assert following is not None
            if not self._map(following, min(size - block.size, following.size)):
                return None
            block = following
        pool.remove(block)
        return block

    def _room(self, pool: Pool, stream: int, size: int) -> Block:
        """The free or unmapped block of lowest address from which `size` bytes can be mapped."""
        for address in sorted(pool.unmapped):
            block = pool.unmapped[address]
            if block.stream != stream:
                continue
            if block.prev is not None and not block.prev.busy:
                block = block.prev
            room, last = 0, block
            while room < size:
                room += last.size
                if last.next is None or last.next.busy:
                    break
                last = last.next
            if room >= size:
                return block
        segment = ExpandableSegment(
            self._next_address, SMALL_SEGMENT if pool.small else self.conf.large_segment_size, self._space
        )
        self._next_address += segment.size
        block = Block(pool, stream, segment.address, segment.size)
        block.segment, block.mapped = segment, False
        pool.unmapped[block.address] = block
        return block

    def _map(self, block: Block, size: int) -> bool:
        """Put whole pages behind the first `size` bytes of an unmapped block; False where the device is full."""
        segment, pool = block.segment, block.pool
        assert segment is not None
        mapped = -(-size // segment.page) * segment.page
        if not self._reserve(mapped):
            return False
        del pool.unmapped[block.address]
        block.mapped = True
        if mapped < block.size:
            rest = Block(pool, block.stream, block.address + mapped, block.size - mapped)
            rest.segment, rest.mapped = segment, False
            splice(rest, block, block.next)
            pool.unmapped[rest.address] = rest
            block.size = mapped
        self._merge_free(block)
        pool.insert(block)
        return True

    def _merge_free(self, block: Block) -> None:
        """Merge a free block with neighbours that are free and mapped as it is."""
        pool = block.pool
        for neighbour in (block.prev, block.next):
            if neighbour is not None and not neighbour.busy and neighbour.mapped == block.mapped:
                if neighbour.mapped:
                    pool.remove(neighbour)
                else:
                    del pool.unmapped[neighbour.address]
                merge(block, neighbour)

    def _release_oversize(self, pool: Pool, stream: int, size: int) -> bool:
        return False  # blocks of expandable segments are not given back one by one

    def _release_all(self, pool: Pool) -> None:
        for block in pool.free_blocks():
            self._unmap(block)

    def _unmap(self, block: Block) -> None:
        """Give the pages back that lie wholly inside a free block."""
        segment, pool = block.segment, block.pool
        assert segment is not None
        start, end = segment.inner(block)
        if start == end:
            return
        pool.remove(block)
        before, after = start - block.address, block.address + block.size - end
        if before:
            first = Block(pool, block.stream, block.address, before)
            first.segment = segment
            splice(first, block.prev, block)
            pool.insert(first)
        if after:
            last = Block(pool, block.stream, end, after)
            last.segment = segment
            splice(last, block, block.next)
            pool.insert(last)
        block.address, block.size, block.mapped = start, end - start, False
        self._merge_free(block)
        self._return(end - start)
        if not block.whole:
            pool.unmapped[block.address] = block


def _size_when_grown(block: Block) -> int:
    """Bytes of a free block with the address space behind it."""
    following = block.next
    return block.size + (following.size if following is not None and not following.mapped else 0)


def allocator_of(
    conf: AllocatorConf, capacity: int | None = None, memory_fraction: float | None = None
) -> CachingAllocator:
    """The allocator that `conf` chooses, on a device of `capacity` bytes (None: without limit)."""
    made = ExpandableAllocator if conf.expandable_segments else CachingAllocator
    return made(conf, capacity, memory_fraction)
