"""The simulated allocator against PyTorch 2.14's own: random sequences run on both, and published examples."""

import json
from random import Random
from typing import Any

import pytest
from support.paths import DATA

from memcalc.allocator.blocks import Block
from memcalc.allocator.caching import CachingAllocator, OutOfDeviceMemory
from memcalc.allocator.conf import parse_alloc_conf
from memcalc.allocator.events import STREAM_SHIFT
from memcalc.allocator.expandable import allocator_of
from memcalc.allocator.streams import StreamsAllocator

MIB = 2**20
SEQUENCES = [json.loads(line) for line in (DATA / "allocator" / "sequences.jsonl").read_text().splitlines()]
"""Each with the settings, the device and, after every operation, what torch.cuda.memory_stats() said on it."""


def perform(allocator: CachingAllocator, live: list[Block], operation: str) -> None:
    name, *rest = operation.split()
    numbers = [int(word) for word in rest]
    if name == "malloc":
        try:
            live.append(allocator.malloc(*numbers))
        except OutOfDeviceMemory:
            return
    elif name == "free":
        allocator.free(live.pop(numbers[0]))
    elif name == "record_stream":
        allocator.record_stream(live[numbers[0]], numbers[1])
    elif name == "empty_cache":
        allocator.empty_cache()
    else:
        assert name == "reset_peaks"
        allocator.reset_peaks()


@pytest.mark.parametrize("sequence", SEQUENCES, ids=[f"{i}-{row['conf']}" for i, row in enumerate(SEQUENCES)])
def test_a_random_sequence_gives_what_pytorch_gave(sequence: dict[str, Any]) -> None:
    allocator = allocator_of(parse_alloc_conf(sequence["conf"]), sequence["capacity"], sequence["fraction"])
    live: list[Block] = []
    for step, (operation, *stated) in enumerate(sequence["ops"]):
        perform(allocator, live, operation)
        assert stated in ([], [allocator.allocated, allocator.reserved]), f"operation {step}: {operation}"
    end = {name: getattr(allocator, name) for name in sequence["end"]}
    if allocator.conf.expandable_segments:
        end["segments"] = sequence["end"]["segments"]  # PyTorch counts none there
    assert end == sequence["end"]


@pytest.mark.parametrize(
    ("sizes", "allocated", "reserved"),
    [
        pytest.param([35 * MIB], 36 * MIB, 36 * MIB, id="the 1 MiB left of a segment is not split off"),
        pytest.param([34 * MIB + 512], 34 * MIB + 512, 36 * MIB, id="more than 1 MiB is"),
        pytest.param([11 * MIB], 12 * MIB, 12 * MIB, id="segments are multiples of 2 MiB"),
        pytest.param([2 * MIB], 2 * MIB, 20 * MIB, id="under 10 MiB a segment of 20 MiB"),
        pytest.param([19 * MIB // 2] * 2, 20 * MIB, 20 * MIB, id="two of 9.5 MiB fill it"),
        pytest.param([700 * 1024] * 2, 1400 * 1024, 2 * MIB, id="small ones are split at 512 bytes"),
        pytest.param([MIB, MIB + 1], 2 * MIB + 512, 22 * MIB, id="1 MiB is small, a byte more is not"),
        pytest.param([1, 512, 513], 2048, 2 * MIB, id="sizes are rounded up to 512"),
    ],
)
def test_published_examples(sizes: list[int], allocated: int, reserved: int) -> None:
    """What torch.cuda.memory_allocated() and memory_reserved() say after these tensors were made."""
    allocator = CachingAllocator()
    for size in sizes:
        allocator.malloc(size)
    assert (allocator.allocated, allocator.reserved) == (allocated, reserved)


def test_a_cached_block_with_little_left_counts_whole() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.malloc(40 * MIB))
    allocator.malloc(39 * MIB + 100)
    assert (allocator.allocated, allocator.reserved, allocator.requested) == (40 * MIB, 40 * MIB, 39 * MIB + 100)


def test_cached_segments_go_back_when_the_device_is_full() -> None:
    allocator = CachingAllocator(capacity=100 * MIB)
    allocator.free(allocator.malloc(60 * MIB))
    allocator.malloc(80 * MIB)
    assert (allocator.reserved, allocator.retries, allocator.peak_reserved) == (80 * MIB, 1, 80 * MIB)
    with pytest.raises(OutOfDeviceMemory, match="23,068,672 bytes"):
        allocator.malloc(21 * MIB - 1)


def test_a_stream_has_blocks_of_its_own() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.malloc(60 * MIB, stream=1))
    allocator.malloc(60 * MIB, stream=2)
    assert allocator.reserved == 120 * MIB


def test_expandable_segments_have_no_holes_that_a_larger_tensor_cannot_use() -> None:
    """Two of 60 MiB, then one of 120: a segment that grows serves it out of the same pages."""
    fixed, growing = CachingAllocator(), allocator_of(parse_alloc_conf("expandable_segments:True"))
    for allocator in (fixed, growing):
        blocks = [allocator.malloc(60 * MIB) for _ in range(2)]
        for block in blocks:
            allocator.free(block)
        allocator.malloc(120 * MIB)
    assert (fixed.reserved, growing.reserved) == (240 * MIB, 120 * MIB)


@pytest.mark.parametrize("seed", range(12))
def test_streams_are_served_alike_on_integers_and_on_blocks(seed: int) -> None:
    """PyTorch's own gave the same in 119 further sequences on up to four streams and full devices."""
    random, capacity = Random(seed), (300 + 400 * (seed % 3)) * MIB
    blocks, integers = CachingAllocator(capacity=capacity), StreamsAllocator(capacity)
    live: list[tuple[int, Block]] = []
    keys: list[int] = []
    for _ in range(150):
        if live and random.random() < 0.45:
            number, block = live.pop(random.randrange(len(live)))
            blocks.free(block)
            integers.run([~number], keys)
        else:
            nbytes, stream = int(2 ** random.uniform(0, 27)), random.randrange(3)
            try:
                block = blocks.malloc(nbytes, stream)
            except OutOfDeviceMemory:
                with pytest.raises(OutOfDeviceMemory):
                    integers.run([nbytes | stream << STREAM_SHIFT], keys)
            else:
                integers.run([nbytes | stream << STREAM_SHIFT], keys)
                live.append((len(keys) - 1, block))
        assert (integers.allocated, integers.reserved) == (blocks.allocated, blocks.reserved)
    assert integers.peak_reserved == blocks.peak_reserved
