"""PyTorch's default allocator for a job that asks for memory on several streams: each stream has pools of its own.

A block comes back to the pool of the stream that it was given out on, whoever used it. All share the device.
"""

from __future__ import annotations

from bisect import bisect_left, insort

from memcalc.allocator.conf import SMALL_SIZE
from memcalc.allocator.events import NBYTES, STREAM_SHIFT
from memcalc.allocator.plain import ADDRESS, SHIFT, UNIT, Live, PlainAllocator, Pool
from memcalc.common.sizes import ALIGNMENT

_POOL_SHIFT = 2 * SHIFT
"""What was given out is the number of its pool above its size above its address."""
_KEY = (1 << _POOL_SHIFT) - 1


class StreamsAllocator(PlainAllocator):
    """`PlainAllocator` with a large and a small pool for every stream, by number: two for each stream."""

    def run(self, codes: list[int], live: Live, workspace: int = 0) -> None:
        """Serve requests and frees (`Events`); `workspace` is what cuBLAS asks for. Raises OutOfDeviceMemory."""
        pools = self._pools
        for code in codes:
            if code < 0:
                key = live[~code] & _KEY
                pools[live[~code] >> _POOL_SHIFT].put_back(key)
                self._allocated -= key >> SHIFT
                continue
            nbytes = code & NBYTES or workspace
            if not nbytes:
                continue
            number = code >> STREAM_SHIFT << 1 | (nbytes <= SMALL_SIZE)
            while number >= len(pools):
                pools += Pool(SMALL_SIZE >> UNIT), Pool(0)
            key = self._given(pools[number], nbytes + ALIGNMENT - 1 >> UNIT)
            self._allocated += key >> SHIFT
            self._peak_allocated = max(self._peak_allocated, self._allocated)
            if code:
                live.append(number << _POOL_SHIFT | key)

    def _given(self, pool: Pool, wanted: int) -> int:
        """The best fit out of a pool, or a block of a new segment."""
        keys = pool.keys
        index = bisect_left(keys, wanted << SHIFT)
        if index == len(keys):
            return self._obtained(pool, wanted)
        key = keys.pop(index)
        address, size = key & ADDRESS, key >> SHIFT
        del pool.begins[address]
        if size - wanted <= pool.split_above:
            del pool.ends[address + size]
            return key
        rest = address + wanted
        pool.begins[rest] = size - wanted
        pool.ends[address + size] = rest
        insort(keys, size - wanted << SHIFT | rest)
        return wanted << SHIFT | address
