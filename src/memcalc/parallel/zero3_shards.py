"""Weights of ZeRO stage 3: this rank's shard of each, and the all-gathers that make them whole.

Source: deepspeed/runtime/zero/partition_parameters.py of DeepSpeed 0.19.6.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from memcalc.autograd.tape import BEFORE, OVERHEAD, WEIGHTS, Allocation, Tape
from memcalc.autograd.tensor import Storage
from memcalc.common.sizes import rounded
from memcalc.nn.module import Parameter
from memcalc.parallel.setup import ZeroOptions

GATHERED = "gathered weights (ZeRO-3)"
SECONDARY = "second shards (ZeRO++)"

GATHER_STREAM = 1
"""The stream of gathered weights, where communication overlaps."""
REDUCE_STREAM = 2
"""The stream of `reduce_and_partition`, where it overlaps."""


class Running(Protocol):
    """What a sharded weight asks its coordinator: the tape, and whether the model is in its forward pass."""

    tape: Tape
    runs: bool


class ShardedStorage(Storage):
    """The memory of a weight that is sharded, which is there while the weight is gathered."""

    def __init__(self, coordinator: Running, shard: Sharded) -> None:
        super().__init__(coordinator.tape, Allocation(WEIGHTS, shard.parameter.group, 0, BEFORE))
        self.coordinator = coordinator
        self.shard = shard

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Gather the weight for code that reads it outside of its module (`GatheredParameters`).

        While the model runs, DeepSpeed sees that (`ZeROOrderedDict`), and gathers it with the model from then on.
        """
        if self.shard.available:
            yield
            return
        self.shard.external |= self.coordinator.runs
        Gather(self.tape, [self.shard])
        yield
        self.shard.free(self.tape)


class Sharded:
    """A weight, this rank's part of it, and where it stands."""

    def __init__(self, parameter: Parameter, ranks: int, options: ZeroOptions, on_host: bool) -> None:
        self.parameter = parameter
        self.numel = parameter.numel
        self.ranks = ranks
        self.on_host = on_host
        self.chunk = -(-self.numel // ranks)
        """Elements of each rank's part, padding included."""
        self.secondary = rounded(self.chunk * ranks // options.hpz_partition_size * parameter.dtype.itemsize)
        """Bytes of the second copy's part, where there is one (`ds_secondary_tensor` of ZeRO++)."""
        self.has_secondary = options.hpz_partition_size == 1
        self.persists = self.numel <= options.stage3_param_persistence_threshold
        self.available = self.persists
        self.fixed = self.persists
        """Whether it is whole all the time; without a complete trace even small weights are freed after their use."""
        self.in_flight: Gather | None = None
        self.active: set[int] = set()
        self.order = 0
        self.stream = 0 if options.overlap_comm is False else GATHER_STREAM
        self.external = False
        """Whether the model reads it past its module: from then on it is a weight of the model's own, too."""
        self.last_used = -1
        """The latest use in the recorded order that fetching has passed."""

    @property
    def padding(self) -> list[int]:
        """Elements of padding behind each rank's part, where there is some."""
        parts = [min(max(self.numel - rank * self.chunk, 0), self.chunk) for rank in range(self.ranks)]
        return [self.chunk - part for part in parts if part < self.chunk]

    @property
    def nbytes(self) -> int:
        """Bytes of one element's dtype times all elements."""
        return self.numel * self.parameter.dtype.itemsize

    def settle(self, coordinator: Running) -> None:
        """Be sharded: modules see a weight without memory."""
        self.parameter.storage = self.sharded = ShardedStorage(coordinator, self)

    def fill(self, tape: Tape, nbytes: int) -> None:
        """Give the whole weight memory. In backward it is a tensor of its own, which a recomputed block may go on
        keeping: what is saved when a block runs again is detached from the parameter.
        """
        made = tape.allocate(nbytes, WEIGHTS, GATHERED, self.stream)
        if tape.phase == "backward":
            self.parameter.storage = made
            return
        self.parameter.storage.allocation = made.allocation
        tape.keep(made)

    def free(self, tape: Tape) -> None:
        """Take it away; the first time after an optimizer's step the second copy is made of it."""
        if not self.has_secondary:
            tape.keep(tape.allocate(self.secondary, WEIGHTS, SECONDARY))
            self.has_secondary = True
        storage = self.parameter.storage
        if storage is not self.sharded:
            self.parameter.storage = self.sharded
            return
        storage.allocation.dies = tape.clock
        storage.allocation = Allocation(WEIGHTS, self.parameter.group, 0, BEFORE)


class Gather:
    """An all-gather that is under way: of one weight into its own memory, of several into one flat buffer."""

    def __init__(self, tape: Tape, shards: Sequence[Sharded]) -> None:
        self.tape = tape
        self.shards = tuple(shards)
        itemsize = shards[0].parameter.dtype.itemsize
        whole = sum(shard.chunk * shard.ranks for shard in shards) * itemsize
        self.buffer: Storage | None = None
        if shards[0].ranks == 1:  # NoGatherHandle: the weight is the shard itself, or its copy from the host
            for shard in shards:
                shard.fill(tape, rounded(shard.nbytes) if shard.on_host else 0)
            self.waited = False
            return
        if len(shards) > 1:
            self.buffer = tape.allocate(whole, OVERHEAD, GATHERED, shards[0].stream)
        else:
            shards[0].fill(tape, whole)
        inputs = [tape.allocate(s.chunk * itemsize, OVERHEAD, GATHERED, s.stream) for s in shards if s.on_host]
        del inputs
        self.waited = False

    def wait(self) -> None:
        """Have the weights there: those of one buffer are each put together anew."""
        if self.waited:
            return
        self.waited = True
        for shard in self.shards:
            if self.buffer is not None:
                shard.fill(self.tape, rounded(shard.nbytes))
            shard.available = True
