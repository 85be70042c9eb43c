"""The caching allocator with PyTorch's default settings and one stream, on integers alone: what most jobs run with.

It gives out the same blocks as `CachingAllocator`, several times as fast. A free block is its size above its address
in one sorted list, so that the first that is large enough is the best fit; neighbours are found by where they begin and
end. Segments lie apart, so that blocks of two of them never touch.
"""

from __future__ import annotations

from bisect import bisect_left, insort

from memcalc.allocator.caching import LARGE_REQUEST, LARGE_ROUNDING, SMALL_SEGMENT, OutOfDeviceMemory
from memcalc.allocator.conf import DEFAULT_CONF, SMALL_SIZE
from memcalc.common.sizes import ALIGNMENT

UNIT = ALIGNMENT.bit_length() - 1
"""Sizes and addresses count units of 512 bytes: small integers are fast."""
SHIFT = 40
ADDRESS = (1 << SHIFT) - 1
_SMALL = SMALL_SIZE >> UNIT
Live = list[int]
"""Size above address of every block that was given out, by the number of its request; small ones are negative."""


class Pool:
    """The free blocks of one kind of segment."""

    __slots__ = ("begins", "ends", "keys", "lengths", "split_above")

    def __init__(self, split_above: int) -> None:
        self.split_above = split_above
        """What is left of a block is split off if it is larger."""
        self.keys: list[int] = []
        self.begins: dict[int, int] = {}
        """Size by address."""
        self.ends: dict[int, int] = {}
        """Address by the address behind it."""
        self.lengths: dict[int, int] = {}
        """Size of every segment by its address."""

    def put_back(self, key: int) -> None:
        """Merge a block with its free neighbours, and keep it."""
        keys, begins, ends = self.keys, self.begins, self.ends
        address = key & ADDRESS
        end = address + (key >> SHIFT)
        if address in ends:
            before = ends.pop(address)
            del keys[bisect_left(keys, address - before << SHIFT | before)]
            address = before
        if end in begins:
            behind = begins.pop(end)
            del keys[bisect_left(keys, behind << SHIFT | end)]
            end += behind
        begins[address] = end - address
        ends[end] = address
        insort(keys, end - address << SHIFT | address)


class PlainAllocator:
    """PyTorch's allocator on a device of `capacity` bytes, CUDA context excluded (None: without limit)."""

    def __init__(self, capacity: int | None = None) -> None:
        self._capacity = None if capacity is None else capacity >> UNIT
        self.retries = self.segments = self.peak_segments = 0
        self._allocated = self._reserved = self._peak_allocated = self._peak_reserved = 0
        self._small, self._large = Pool(0), Pool(_SMALL)
        self._pools = [self._large, self._small]
        self._next_address = 0

    @property
    def allocated(self) -> int:
        """Bytes that are given out."""
        return self._allocated << UNIT

    @property
    def reserved(self) -> int:
        """Bytes of all segments."""
        return self._reserved << UNIT

    @property
    def peak_allocated(self) -> int:
        """The most that was given out."""
        return self._peak_allocated << UNIT

    @property
    def peak_reserved(self) -> int:
        """The most that was reserved."""
        return self._peak_reserved << UNIT

    def run(self, codes: list[int], live: Live, workspace: int = 0) -> None:
        """Serve requests and frees (`Events`); `workspace` is what cuBLAS asks for. Raises OutOfDeviceMemory."""
        small, large, append = self._small, self._large, live.append
        allocated, peak = self._allocated, self._peak_allocated
        for code in codes:
            if code < 0:
                key = live[~code]
                if key < 0:
                    key = -key
                    small.put_back(key)
                else:
                    large.put_back(key)
                allocated -= key >> SHIFT
                continue
            wanted = (code or workspace) + ALIGNMENT - 1 >> UNIT
            if not wanted:
                continue
            pool = small if wanted <= _SMALL else large
            keys = pool.keys
            index = bisect_left(keys, wanted << SHIFT)
            if index < len(keys):
                key = keys.pop(index)
                address = key & ADDRESS
                left = (key >> SHIFT) - wanted
                del pool.begins[address]
                if left > pool.split_above:
                    rest = address + wanted
                    pool.begins[rest] = left
                    pool.ends[rest + left] = rest
                    insort(keys, left << SHIFT | rest)
                    key = wanted << SHIFT | address
                else:
                    del pool.ends[address + (key >> SHIFT)]
            else:
                key = self._obtained(pool, wanted)
            allocated += key >> SHIFT
            if allocated > peak:
                peak = allocated
            if code:
                append(-key if pool is small else key)
        self._allocated, self._peak_allocated = allocated, peak

    def _obtained(self, pool: Pool, wanted: int) -> int:
        """A block out of a new segment, after giving cached ones back where the device is full."""
        length = _segment_size(wanted)
        if self._capacity is not None and self._reserved + length > self._capacity:
            self.empty_cache()
            self.retries += 1
            if self._reserved + length > self._capacity:
                raise OutOfDeviceMemory(length << UNIT)
        self._reserved += length
        self._peak_reserved = max(self._peak_reserved, self._reserved)
        self.segments += 1
        self.peak_segments = max(self.peak_segments, self.segments)
        address = self._next_address
        pool.lengths[address] = length
        self._next_address += length + 1
        if length - wanted <= pool.split_above:
            return length << SHIFT | address
        pool.put_back(length - wanted << SHIFT | address + wanted)
        return wanted << SHIFT | address

    def empty_cache(self) -> None:
        """Give segments that nothing uses back to the device (`torch.cuda.empty_cache`)."""
        for pool in self._pools:
            for address, size in list(pool.begins.items()):
                if pool.lengths.get(address) == size:
                    del pool.keys[bisect_left(pool.keys, size << SHIFT | address)]
                    del pool.begins[address], pool.ends[address + size], pool.lengths[address]
                    self._reserved -= size
                    self.segments -= 1

    def reset_peaks(self) -> None:
        """Let every peak be what there is now (`torch.cuda.reset_peak_memory_stats`)."""
        self._peak_allocated, self._peak_reserved = self._allocated, self._reserved
        self.peak_segments = self.segments

    def free_sizes(self) -> tuple[tuple[int, ...], ...]:
        """The free blocks of each pool by size: what the next requests meet."""
        return tuple(tuple(key >> SHIFT for key in pool.keys) for pool in self._pools)


def _segment_size(wanted: int) -> int:
    """Units of the segment that a request of so many gets."""
    if wanted <= _SMALL:
        return SMALL_SEGMENT >> UNIT
    if wanted < LARGE_REQUEST >> UNIT:
        return DEFAULT_CONF.large_segment_size >> UNIT
    step = LARGE_ROUNDING >> UNIT
    return -(-wanted // step) * step
