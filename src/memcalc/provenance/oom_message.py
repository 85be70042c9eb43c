"""PyTorch's out-of-memory messages, old and new, as numbers.

Source: c10/cuda/CUDACachingAllocator.cpp of PyTorch 1.0 to 2.14. Every size has two decimals (`format_size`), and what
was tried is the segment that the driver was asked for, not the tensor.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from memcalc.allocator.caching import LARGE_REQUEST, LARGE_ROUNDING, SMALL_SEGMENT
from memcalc.allocator.conf import DEFAULT_CONF, SMALL_SIZE
from memcalc.common.escaping import quoted
from memcalc.common.sizes import rounded
from memcalc.errors import UsageError

_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_SIZE = r"(?P<number>[0-9]{1,9}(?:\.[0-9]{1,6})?) ?(?P<unit>bytes|[KMG]iB)"
_TRIED = re.compile(rf"[Tt]ried to allocate {_SIZE}")
_LONGEST = 4000
"""Characters of one message at most; what stands behind belongs to something else."""


@dataclass(frozen=True)
class PrintedSize:
    """A size as a message prints it: a number with its decimals, and a unit."""

    number: str
    unit: str

    def __str__(self) -> str:
        return f"{self.number} {self.unit}"

    @property
    def nbytes(self) -> int:
        """The bytes that it stands for, as near as its decimals tell."""
        return round(float(self.number) * _UNITS[self.unit])

    def is_printed_for(self, nbytes: int) -> bool:
        """Whether the allocator prints this size when it has no room for a tensor of `nbytes` bytes."""
        decimals = len(self.number.partition(".")[2])
        return f"{segment_bytes(nbytes) / _UNITS[self.unit]:.{decimals}f}" == self.number


@dataclass(frozen=True)
class OutOfMemory:
    """The numbers of one message, in bytes; None for those that its format does not have.

    tried: the segment that could not be had.
    device: the number of the GPU.
    capacity, free: of the whole GPU.
    process: all that this process has on it.
    allocated, reserved: by PyTorch; reserved includes what is allocated.
    allowed: the most that the process may have, where that was limited.
    """

    tried: PrintedSize
    device: int | None = None
    capacity: int | None = None
    free: int | None = None
    process: int | None = None
    allocated: int | None = None
    reserved: int | None = None
    allowed: int | None = None

    @property
    def outside(self) -> int | None:
        """What the process has on the GPU besides PyTorch's tensors: the context, libraries."""
        return None if self.process is None or self.reserved is None else self.process - self.reserved


def segment_bytes(nbytes: int) -> int:
    """What the allocator asks the driver for when it has no free block for `nbytes` bytes (`get_allocation_size`)."""
    size = rounded(nbytes)
    if size <= SMALL_SIZE:
        return SMALL_SEGMENT
    if size < LARGE_REQUEST:
        return DEFAULT_CONF.large_segment_size
    return -(-size // LARGE_ROUNDING) * LARGE_ROUNDING


def parse_message(text: str) -> OutOfMemory:
    """The first out-of-memory message in `text`; a size alone is taken for the size that was tried.

    Raises UsageError where there is none.
    """
    alone = re.fullmatch(rf"\s*{_SIZE}\s*", text)
    found = _TRIED.search(text) or alone
    if found is None:
        said = "MPS backend" if "MPS backend" in text else None
        raise UsageError(
            "--oom needs PyTorch's message on a CUDA device, and MPS words its own differently."
            if said
            else f'--oom finds no "Tried to allocate 1.96 GiB" in {quoted(text[:80])}; paste the whole message, or '
            "give the path of a log that has it."
        )
    tried = PrintedSize(found["number"], found["unit"])
    if alone is not None:
        return OutOfMemory(tried)
    rest = text[found.end() : found.end() + _LONGEST]
    following = _TRIED.search(rest)
    rest = rest[: following.start()] if following else rest
    allocated = _first(rest, rf"{_SIZE} is allocated by PyTorch", rf"{_SIZE} already allocated")
    unallocated = _first(rest, rf"{_SIZE} is reserved by PyTorch but unallocated")
    reserved = _first(rest, rf"{_SIZE} reserved in total by PyTorch", rf"{_SIZE} cached")
    if reserved is None and allocated is not None and unallocated is not None:
        reserved = allocated + unallocated
    device = re.search(r"GPU ([0-9]{1,4})\b", rest)
    return OutOfMemory(
        tried,
        device=None if device is None else int(device[1]),
        capacity=_first(rest, rf"total capaci?ty of {_SIZE}", rf"{_SIZE} total capacity"),
        free=_first(rest, rf"of which {_SIZE} is free", rf"{_SIZE} free"),
        process=_first(rest, rf"this process has {_SIZE} memory in use"),
        allocated=allocated,
        reserved=reserved,
        allowed=_first(rest, rf"{_SIZE} allowed"),
    )


def message_in(lines: Iterable[str]) -> str:
    """The first line of a log that says how much could not be had, with the few behind it; "" where there is none."""
    kept: list[str] = []
    for line in lines:
        if kept or "ried to allocate" in line:
            kept.append(line[:_LONGEST])
        if sum(map(len, kept)) > _LONGEST:
            break
    return "".join(kept)


def _first(text: str, *patterns: str) -> int | None:
    """The size that the first of these patterns finds, in bytes."""
    for pattern in patterns:
        if found := re.search(pattern, text):
            return PrintedSize(found["number"], found["unit"]).nbytes
    return None
