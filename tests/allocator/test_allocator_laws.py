"""Laws of the allocator, on sequences that hypothesis makes up."""

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from memcalc.allocator.blocks import Block
from memcalc.allocator.caching import CachingAllocator, OutOfDeviceMemory
from memcalc.allocator.conf import parse_alloc_conf
from memcalc.allocator.expandable import allocator_of

MIB = 2**20
CONFS = ["", "expandable_segments:True", "max_split_size_mb:32", "roundup_power2_divisions:4"]

SIZES = st.one_of(st.integers(1, 4096), st.integers(1, 3 * MIB), st.integers(8 * MIB, 90 * MIB))
OPERATIONS = st.lists(st.tuples(st.booleans(), SIZES, st.integers(0, 10**6), st.integers(0, 1)), max_size=60)


def replay(
    allocator: CachingAllocator, operations: list[tuple[bool, int, int, int]]
) -> tuple[list[Block], list[tuple[int, int]]]:
    """What is live at the end, and allocated and reserved after each operation."""
    live: list[Block] = []
    seen = []
    for frees, size, which, stream in operations:
        if frees and live:
            allocator.free(live.pop(which % len(live)))
        else:
            try:
                live.append(allocator.malloc(size, stream))
            except OutOfDeviceMemory:
                break
        seen.append((allocator.allocated, allocator.reserved))
        assert allocator.reserved >= allocator.allocated >= allocator.requested
        assert allocator.allocated == sum(block.size for block in live)
        assert allocator.peak_allocated >= allocator.allocated
        assert allocator.peak_reserved >= allocator.reserved
    return live, seen


@settings(max_examples=60, deadline=None)
@given(OPERATIONS, st.sampled_from(CONFS))
def test_reserved_is_no_less_than_allocated_and_that_no_less_than_requested(operations: Any, conf: str) -> None:
    allocator = allocator_of(parse_alloc_conf(conf))
    live, _ = replay(allocator, operations)
    for block in live:
        allocator.free(block)
    assert (allocator.allocated, allocator.requested) == (0, 0)
    allocator.empty_cache()
    assert (allocator.reserved, allocator.taken) == (0, 0)


@settings(max_examples=60, deadline=None)
@given(OPERATIONS, st.sampled_from(CONFS), st.integers(1, 200))
def test_a_device_that_is_large_enough_changes_nothing(operations: Any, conf: str, spare: int) -> None:
    free = allocator_of(parse_alloc_conf(conf))
    _, seen = replay(free, operations)
    limited = allocator_of(parse_alloc_conf(conf), capacity=free.peak_reserved + spare * 2 * MIB)
    assert replay(limited, operations)[1] == seen
    assert limited.retries == 0


@settings(max_examples=60, deadline=None)
@given(OPERATIONS, st.sampled_from(CONFS), st.integers(10, 300))
def test_a_device_never_gives_more_than_it_has(operations: Any, conf: str, capacity: int) -> None:
    allocator = allocator_of(parse_alloc_conf(conf), capacity=capacity * 2 * MIB)
    replay(allocator, operations)
    assert allocator.peak_reserved <= capacity * 2 * MIB


@settings(max_examples=60, deadline=None)
@given(OPERATIONS)
def test_blocks_of_a_segment_follow_one_another(operations: Any) -> None:
    allocator = CachingAllocator()
    live, _ = replay(allocator, operations)
    free = [*allocator.small.free_blocks(), *allocator.large.free_blocks()]
    assert sum(block.size for block in [*live, *free]) == allocator.reserved
    for block in [*live, *free]:
        following = block.next
        assert following is None or (following.prev is block and following.address == block.address + block.size)
        assert following is None or block.busy or following.busy, "free neighbours are merged"
