"""Saved tensors that go to host memory instead of staying on the device.

Source: OffloadActivations of TRL and torchtune. A tensor that is not contiguous is copied on the device first; an
operation's inputs are saved before it runs, its results after.
"""

from __future__ import annotations

from typing import Final

from memcalc.autograd.tape import BEFORE, WEIGHTS, Allocation, Tape
from memcalc.autograd.tensor import Tensor, is_contiguous

SMALLEST_OFFLOADED: Final = 1024
"""Bytes of the smallest tensor that is worth the way."""

_MOST_RESULTS: Final = 4
"""As many tensors an operation gives at most, of those that keep their inputs (attention)."""


def can_offload(kept: Tensor) -> bool:
    """Whether a tensor that is saved goes to host memory: not weights, and nothing small."""
    allocation = kept.storage.allocation
    weight = allocation.row == WEIGHTS and allocation.born == BEFORE
    return not weight and kept.numel * kept.dtype.itemsize >= SMALLEST_OFFLOADED


def offload(tape: Tape, kept: Tensor) -> int:
    """Copy a tensor to host memory; returns its bytes there."""
    broadcast = 0 in kept.stride
    if not broadcast and not is_contiguous(kept.shape, kept.stride):
        copy = tape.empty(kept.shape, kept.dtype).storage.allocation
        _put_before_results(tape, kept, copy)
    nbytes = kept.storage.allocation.raw_nbytes if broadcast else kept.numel * kept.dtype.itemsize
    tape.host_bytes += nbytes * tape.turns * (1 if tape.block is None else tape.block.copies)
    return nbytes


def _put_before_results(tape: Tape, kept: Tensor, copy: Allocation) -> None:
    """Let the copy of an operation's input, the last allocation, have come before the operation's results."""
    made, results = tape.last_output, tape.allocations[-1 - _MOST_RESULTS : -1]
    if made not in results or kept.storage.allocation.born >= made.born:
        return
    results = results[results.index(made) :]
    tape.allocations[-1 - len(results) :] = [copy, *results]
    tick = copy.born
    for allocation in tape.allocations:
        if made.born < allocation.dies <= tick:
            allocation.dies += 1
    copy.born, copy.dies = made.born, made.born + 1
    for allocation in results:
        allocation.born += 1
