"""The bucket that DeepSpeed reduces gradients through, and how flat weights are cut into partitions.

Source: deepspeed/runtime/zero/stage_1_and_2.py of DeepSpeed 0.19.6 (`reduce_independent_p_g_buckets_and_remove_grads`,
`reduce_ipg_grads`, `average_tensor`).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Protocol

from memcalc.common.sizes import rounded
from memcalc.optim.weight import SCALAR
from memcalc.parallel.setup import ZeroOptions

LOSSES = 2
"""The loss over the micro-batches and the loss times its scale, which DeepSpeed makes before backward."""
REDUCTION = 1
"""The stream of reductions that overlap with backward (`reduction_stream`)."""
START_ALIGNMENT = 2
"""Elements to a multiple of which each rank's partition is padded (`nccl_start_alignment_factor`)."""


class Memory(Protocol):
    """Something that memory comes from; a piece is freed when nothing refers to it."""

    def new(self, nbytes: int, stream: int = 0) -> object:
        """A piece of `nbytes` bytes on a stream."""


class Partition:
    """Flat weights of `numels` elements over `ranks`, each an equal part, as rank 0 sees them."""

    def __init__(self, numels: Sequence[int], ranks: int, round_robin: bool = False) -> None:
        self.numels = list(numels)
        self.ranks = ranks
        total = sum(numels)
        alignment = START_ALIGNMENT * ranks
        self.padded = -(-total // alignment) * alignment
        self.size = self.padded // ranks
        order = list(range(len(self.numels)))
        if round_robin:
            order = [index for rank in range(ranks) for index in order[rank::ranks]]
        starts = accumulate((self.numels[index] for index in order), initial=0)
        self.starts = dict(zip(order, starts, strict=False))
        own = [index for index in order if self.starts[index] < self.size]
        self.direct_tensors = frozenset(own)
        self.own_elements = sum(self.numels[index] for index in own)
        pieces = [min(self.numels[index], self.size - self.starts[index]) for index in own]
        self.pieces = [*pieces, *([self.size - sum(pieces)] if sum(pieces) < self.size else [])] or [self.size]

    def owners(self, index: int) -> list[tuple[int, int]]:
        """The ranks that own a part of weight `index`, with the elements of each part."""
        start, end = self.starts[index], self.starts[index] + self.numels[index]
        parts = []
        while start < end:
            rank = start // self.size
            stop = min(end, (rank + 1) * self.size)
            parts.append((rank, stop - start))
            start = stop
        return parts


WIDE = 4
"""Bytes of an element of gradients that are reduced in fp32."""


class Bucket:
    """Gradients that wait to be reduced. `clears`: those of other ranks go when they are reduced (stage 2); `widens`:
    they are reduced in fp32."""

    def __init__(  # noqa: PLR0913 (DeepSpeed's switches)
        self,
        memory: Memory,
        partition: Partition,
        options: ZeroOptions,
        itemsize: int,
        *,
        overlap: bool,
        clears: bool,
        offloads: bool,
        widens: bool = False,
    ) -> None:
        self.memory, self.partition, self.options, self.itemsize = memory, partition, options, itemsize
        self.overlap, self.clears, self.offloads = overlap, clears, offloads
        self.widens = widens and itemsize < WIDE
        self.stream = REDUCTION if overlap else 0
        self.limit = options.reduce_bucket_size
        self.buffers: list[object] = []
        self.elements = 0
        self.waiting: list[tuple[int, list[object]]] = []
        self.direct_tensors: object | None = None
        """The memory of this rank's own gradients (`grads_in_partition`)."""
        self.left: list[object] = []
        """What stays until the end of backward."""
        self.norms: list[object] = []

    def allocate(self, elements: int) -> None:
        """Have the buffer, or two where reduction overlaps with backward."""
        if self.options.contiguous_gradients:
            for _ in range(2 if self.overlap else 1):
                self.buffers.append(self.memory.new(rounded(elements * self.itemsize)))

    def ready(self, index: int, gradient: list[object]) -> None:
        """The gradient of weight `index` is there, and is this call's to free."""
        numel = self.partition.numels[index]
        if self.elements + numel > self.limit:
            self.reduce()
        if self.options.contiguous_gradients and numel <= self.limit:
            gradient.clear()
        self.waiting.append((index, gradient))
        self.elements += numel

    def reduce(self) -> None:
        """Reduce what waits, then free it or copy it into this rank's own gradients."""
        self._communicate()
        for index, gradient in self.waiting:
            if index in self.partition.direct_tensors:
                self._keep(index, gradient)
            elif not self.clears:
                self.left.append(gradient)
                continue
            if self.options.contiguous_gradients:
                gradient.clear()
        self.waiting.clear()
        self.elements = 0

    def _keep(self, index: int, gradient: list[object]) -> None:
        if self.offloads:
            piece = min(self.partition.numels[index], self.partition.size - self.partition.starts[index])
            wide = self.memory.new(rounded(8 * piece))
            self.norms.append(self.memory.new(SCALAR))
            del wide
            wide = self.memory.new(rounded(4 * piece)) if self.itemsize < 4 else None
            del wide
            gradient.clear()
        elif not self.options.contiguous_gradients:
            self.left.append(gradient)
        elif self.direct_tensors is None:
            self.direct_tensors = self.memory.new(rounded(self.partition.own_elements * self.itemsize), self.stream)

    def _communicate(self) -> None:
        """Slices by their owners are concatenated, as many as the bucket takes; a single one is reduced in place."""
        if not self.options.contiguous_gradients:
            self._concatenate([self.partition.numels[index] for index, _ in self.waiting], self.elements)
        elif self.options.reduce_scatter:
            merged: list[list[int]] = []
            for index, _ in self.waiting:
                for rank, numel in self.partition.owners(index):
                    if merged and merged[-1][0] == rank:
                        merged[-1][1] += numel
                    else:
                        merged.append([rank, numel])
            self._concatenate([numel for _, numel in merged], self.limit)

    def _concatenate(self, sizes: list[int], limit: int) -> None:
        waiting: list[int] = []
        for position, numel in enumerate(sizes):
            waiting.append(numel)
            if sum(waiting) > limit or position == len(sizes) - 1:
                copy = self.memory.new(rounded(sum(waiting) * self.itemsize), self.stream) if len(waiting) > 1 else None
                wide = self.memory.new(rounded(sum(waiting) * WIDE), self.stream) if self.widens else None
                del copy, wide
                waiting = []
