"""The caching allocator: how PyTorch serves tensors out of segments that it keeps.

Source: c10/cuda/CUDACachingAllocator.cpp and c10/core/AllocatorConfig.h of PyTorch 2.14. A request is rounded up to
512 bytes and served by the smallest free block of its stream that holds it; where there is none, by a new segment of
2 MiB (requests up to 1 MiB), of 20 MiB (under 10 MiB), or of the request rounded up to 2 MiB. What is left of a block
is split off, unless little is left; free neighbours are merged. Segments go back to the device only when it is full.
"""

from __future__ import annotations

from memcalc.allocator.blocks import Block, Pool, merge, splice
from memcalc.allocator.conf import DEFAULT_CONF, SMALL_SIZE, AllocatorConf
from memcalc.allocator.events import NBYTES, STREAM_SHIFT
from memcalc.common.sizes import ALIGNMENT

SMALL_SEGMENT = 2 * 2**20
"""Segments that requests of at most 1 MiB are packed into (kSmallBuffer)."""
LARGE_REQUEST = 10 * 2**20
"""From this size on a request gets a segment of its own size (kMinLargeAlloc)."""
LARGE_ROUNDING = 2 * 2**20
"""Such segments are multiples of this (kRoundLarge)."""
PAGE = 2 * 2**20
"""The driver gives out memory in pages of this size."""


class OutOfDeviceMemory(Exception):
    """The device has no room for `size` bytes more, even after all cached segments were given back."""

    def __init__(self, size: int) -> None:
        super().__init__(f"out of memory: {size:,} bytes more are not there")
        self.size = size


class CachingAllocator:
    """PyTorch's allocator on a device of `capacity` bytes, CUDA context excluded (None: without limit).

    `memory_fraction` is what `torch.cuda.set_per_process_memory_fraction` was given, None where it was not called.
    Sizes and counters are in bytes and mean what `torch.cuda.memory_stats()` says under the same name.
    """

    def __init__(
        self, conf: AllocatorConf = DEFAULT_CONF, capacity: int | None = None, memory_fraction: float | None = None
    ) -> None:
        self.conf = conf
        self.capacity = capacity
        self.allowed = None if memory_fraction is None or capacity is None else int(memory_fraction * capacity)
        self.collects = self.allowed is not None and conf.garbage_collection_threshold > 0
        self.allocated = self.requested = self.reserved = self.segments = self.retries = 0
        self.taken = 0
        """Bytes of the device that are taken: what is reserved, in whole pages."""
        self.peak_allocated = self.peak_requested = self.peak_reserved = self.peak_segments = 0
        self.small, self.large = Pool(small=True), Pool(small=False)
        self._max_split = conf.max_split_size
        self._next_address = 0
        self._waiting: list[Block] = []
        """Blocks that were freed while another stream used them: they come back with the next request."""

    # -- what a program calls -------------------------------------------------------------------------------------

    def malloc(self, nbytes: int, stream: int = 0) -> Block:
        """A block for `nbytes` bytes (at least one) on a stream. Raises OutOfDeviceMemory."""
        if self._waiting:
            self._finish_waiting()
        size = self.conf.rounded(nbytes)
        pool = self.small if size <= SMALL_SIZE else self.large
        block = self._cached(pool, stream, size) or self._obtained(pool, stream, size)
        left = block.size - size
        if left >= ALIGNMENT and self._splits(pool, size, left):
            rest = block
            block = Block(pool, stream, rest.address, size)
            block.segment = rest.segment
            splice(block, rest.prev, rest)
            rest.address += size
            rest.size = left
            pool.insert(rest)
        block.busy = True
        block.requested = nbytes
        self.allocated += block.size
        self.requested += nbytes
        if self.allocated > self.peak_allocated:
            self.peak_allocated = self.allocated
        if self.requested > self.peak_requested:
            self.peak_requested = self.requested
        return block

    def run(self, codes: list[int], live: list[Block], workspace: int = 0) -> None:
        """Serve requests and frees (`Events`); `workspace` is what cuBLAS asks for. Raises OutOfDeviceMemory."""
        malloc, free, append = self.malloc, self.free, live.append
        for code in codes:
            if code > 0:
                append(malloc(code & NBYTES, code >> STREAM_SHIFT))
            elif code < 0:
                free(live[~code])
            elif workspace:
                malloc(workspace)

    def free(self, block: Block) -> None:
        """Give a block back; one that another stream uses is there again with the next request."""
        self.allocated -= block.size
        if block.used_by is not None:
            self._waiting.append(block)
        else:
            self._put_back(block)

    def record_stream(self, block: Block, stream: int) -> None:
        """Say that another stream uses a block too (`torch.Tensor.record_stream`)."""
        if stream != block.stream:
            block.used_by = (block.used_by or set()) | {stream}

    def empty_cache(self) -> None:
        """Give segments that nothing uses back to the device (`torch.cuda.empty_cache`)."""
        self._finish_waiting()
        self._release_all(self.large)
        self._release_all(self.small)

    def reset_peaks(self) -> None:
        """Let every peak be what there is now (`torch.cuda.reset_peak_memory_stats`)."""
        self.peak_allocated, self.peak_requested = self.allocated, self.requested
        self.peak_reserved, self.peak_segments = self.reserved, self.segments

    def free_sizes(self) -> tuple[tuple[int, ...], ...]:
        """The free blocks of both pools by stream and size: what the next requests meet."""
        return tuple(tuple(block.size for block in pool.free_blocks()) for pool in (self.small, self.large))

    # -- pools ----------------------------------------------------------------------------------------------------

    def _cached(self, pool: Pool, stream: int, size: int) -> Block | None:
        """The smallest free block of a stream that holds `size` bytes, out of its pool."""
        if self.collects:
            pool.searches += 1
        index = pool.search(stream, size)
        if index == len(pool.keys):
            return None
        found = pool.at(index)
        if found.stream != stream:
            return None
        if self._max_split is not None:
            if size < self._max_split <= found.size:
                return None
            if size >= self._max_split and found.size >= size + self.conf.max_non_split_rounding:
                return None
        del pool.keys[index]
        del pool.blocks[found.address]
        return found

    def _splits(self, pool: Pool, size: int, left: int) -> bool:
        """Whether what is `left` of a block beside `size` bytes becomes a block of its own."""
        return pool.small or (left > SMALL_SIZE and (self._max_split is None or size < self._max_split))

    def _put_back(self, block: Block) -> None:
        """Merge a block with its free neighbours, and keep it."""
        self.requested -= block.requested
        block.busy = False
        pool = block.pool
        for neighbour in (block.prev, block.next):
            if neighbour is not None and not neighbour.busy and neighbour.mapped:
                pool.remove(neighbour)
                merge(block, neighbour)
        pool.insert(block)

    def _finish_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        for block in waiting:
            block.used_by = None
            self._put_back(block)

    # -- segments -------------------------------------------------------------------------------------------------

    def _obtained(self, pool: Pool, stream: int, size: int) -> Block:
        """A block out of a new segment, after giving cached ones back where the device is full."""
        if self.collects:
            self._collect_garbage()
        length = self._segment_size(size)
        block = self._new_block(pool, stream, size, length)
        if block is None and self._release_oversize(pool, stream, size):
            block = self._new_block(pool, stream, size, length)
        if block is None:
            self.empty_cache()
            self.retries += 1
            block = self._new_block(pool, stream, size, length)
        if block is None:
            raise OutOfDeviceMemory(length)
        return block

    def _segment_size(self, size: int) -> int:
        if size <= SMALL_SIZE:
            return SMALL_SEGMENT
        if size < LARGE_REQUEST:
            return self.conf.large_segment_size
        return -(-size // LARGE_ROUNDING) * LARGE_ROUNDING

    def _new_block(self, pool: Pool, stream: int, size: int, length: int) -> Block | None:
        """A block of at least `size` bytes in a new segment of `length` bytes; None where the device is full."""
        if self.allowed is not None and self.reserved + length > self.allowed:
            return None
        if not self._reserve(length):
            return None
        self.segments += 1
        self.peak_segments = max(self.peak_segments, self.segments)
        # Of equal blocks PyTorch takes that of the oldest segment, wherever it lies: so addresses count segments.
        address = self._next_address
        self._next_address += length
        return Block(pool, stream, address, length)

    def _reserve(self, nbytes: int) -> bool:
        """Take memory of the device, in whole pages; False where it has not so much."""
        taken = -(-nbytes // PAGE) * PAGE
        if self.capacity is not None and self.taken + taken > self.capacity:
            return False
        self.taken += taken
        self.reserved += nbytes
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        return True

    def _return(self, nbytes: int) -> None:
        """Give memory back to the device."""
        self.taken -= -(-nbytes // PAGE) * PAGE
        self.reserved -= nbytes

    def _release(self, block: Block) -> None:
        """Give a whole segment back to the device."""
        block.pool.remove(block)
        self._return(block.size)
        self.segments -= 1

    def _release_all(self, pool: Pool) -> None:
        for block in pool.free_blocks():
            if block.whole:
                self._release(block)

    def _release_oversize(self, pool: Pool, stream: int, size: int) -> bool:
        """Give back blocks that are too large to be split, as many as `size` bytes need; whether that is enough."""
        if self._max_split is None:
            return False
        needed = max(size, self._max_split)
        index = pool.search(stream, needed)
        if index < len(pool.keys) and pool.at(index).stream == stream:
            self._release(pool.at(index))
            return True
        released = 0
        while index and released < needed:
            index -= 1
            block = pool.at(index)
            if block.size < self._max_split or block.stream != stream:
                break
            released += block.size
            self._release(block)
        return released >= needed

    def _collect_garbage(self) -> None:
        """Give back segments that were not used for long, where more than a share of what is allowed is reserved."""
        assert self.allowed is not None
        limit = int(self.conf.garbage_collection_threshold * self.allowed)
        target = self.reserved - limit
        if target <= 0:
            return
        searches = self.large.searches
        candidates = [block for block in self.large.free_blocks() if block.whole]
        while target > 0 and candidates:
            average = sum(searches - block.cached_at for block in candidates) / len(candidates)
            for block in candidates:
                if searches - block.cached_at >= average:
                    target -= block.size
                    self._release(block)
            candidates = [block for block in candidates if searches - block.cached_at < average]
