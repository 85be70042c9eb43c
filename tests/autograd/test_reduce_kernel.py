"""The reduction kernel's scratch is what PyTorch 2.14 allocated for sums of many shapes and layouts."""

import json

import pytest
from support.paths import DATA
from support.tape_events import DEVICES

from memcalc.autograd.reduce_kernel import reduce_scratch
from memcalc.autograd.tensor import contiguous_stride

ROWS = [json.loads(line) for line in (DATA / "allocator" / "reductions.jsonl").read_text().splitlines()]
"""Each with the GPU, the tensor, the dimensions that were summed, and what was allocated beside the sum, in bytes."""


@pytest.mark.parametrize("device", ["h100", "a6000", "t4"])
def test_sums_allocate_what_pytorch_does(device: str) -> None:
    rows = [row for row in ROWS if row["device"] == device]
    assert len(rows) > 80
    for row in rows:
        scratch = reduce_scratch(tuple(row["shape"]), tuple(row["stride"]), row["dims"], DEVICES[device])
        have = [] if scratch is None else [scratch.buffer, scratch.semaphores]
        assert have == row["scratch"], row


def test_a_bias_gradient_takes_eight_bytes_a_value_up_to_a_cap() -> None:
    """The sum over T tokens of width N: 8 T N bytes, until all multiprocessors have work."""
    sizes = {}
    for tokens in (1024, 2048, 4096, 8192, 65536):
        scratch = reduce_scratch((tokens, 4096), contiguous_stride((tokens, 4096)), [0], DEVICES["h100"])
        assert scratch is not None
        sizes[tokens] = scratch.buffer
    assert sizes[1024] == 8 * 1024 * 4096
    assert sizes[4096] == 8 * 4096 * 4096
    assert sizes[8192] == sizes[65536] == 138_412_032
