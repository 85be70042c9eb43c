"""When ZeRO stage 3 gathers, prefetches and releases the weights of submodules.

Source: deepspeed/runtime/zero/partitioned_param_coordinator.py of DeepSpeed 0.19.6. From the second step on it knows
the order of submodules from the step before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from memcalc.autograd.tape import BEFORE, OVERHEAD, WEIGHTS, Allocation, Tape
from memcalc.autograd.tensor import Storage
from memcalc.common.sizes import rounded
from memcalc.nn.module import Parameter
from memcalc.parallel import traffic
from memcalc.parallel.setup import ZeroOptions

GATHERED = "gathered weights (ZeRO-3)"

GATHER_STREAM = 1
"""The stream of gathered weights, where communication overlaps."""
REDUCE_STREAM = 2
"""The stream of `reduce_and_partition`, where it overlaps."""


class Sharded:
    """A weight, this rank's part of it, and where it stands."""

    def __init__(self, parameter: Parameter, ranks: int, options: ZeroOptions, on_host: bool) -> None:
        self.parameter = parameter
        self.numel = parameter.numel
        self.ranks = ranks
        self.on_host = on_host
        self.chunk = -(-self.numel // ranks)
        """Elements of each rank's part, padding included."""
        self.persists = self.numel <= options.stage3_param_persistence_threshold
        self.available = self.persists
        self.in_flight: Gather | None = None
        self.active: set[int] = set()
        self.order = 0
        self.stream = 0 if options.overlap_comm is False else GATHER_STREAM
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

    def settle(self, tape: Tape) -> None:
        """Be sharded: modules see a weight without memory."""
        self.parameter.storage = self.sharded = Storage(tape, Allocation(WEIGHTS, self.parameter.group, 0, BEFORE))

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
        """Take it away."""
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


@dataclass(frozen=True, eq=False)
class Recorded:
    """The order of submodules in a step, forward and backward, each with its weights by their place in the model."""

    uses: tuple[tuple[int, ...], ...]


class Coordinator:
    """PartitionedParameterCoordinator, for one step."""

    def __init__(self, tape: Tape, options: ZeroOptions, recorded: Recorded | None) -> None:
        self.tape = tape
        self.options = options
        self.trace = recorded
        self.step = 0
        self.live = 0
        """Elements gathered now (`n_available_params`)."""
        self.by_order: dict[int, Sharded] = {}
        self.queue: deque[tuple[int, int]] = deque()
        if recorded is not None:
            self.queue.extend((order, step) for step, use in enumerate(recorded.uses) for order in sorted(set(use)))
        self._uses: list[tuple[int, ...]] = []
        self.in_backward: list[tuple[object, tuple[Sharded, ...]]] = []

    @property
    def recorded(self) -> Recorded:
        """What this step's order was."""
        return Recorded(tuple(self._uses))

    def fetch(self, module: object, params: tuple[Sharded, ...], *, backward: bool = False) -> None:
        """Gather the weights of a submodule, wait for them, and issue the gathering of those that come next."""
        self._uses.append(tuple(shard.order for shard in params))
        if backward:
            self.in_backward.append((module, params))
        self._gather([shard for shard in params if not shard.available and shard.in_flight is None])
        for shard in params:
            shard.active.add(id(module))
            if shard.in_flight is not None:
                shard.in_flight.wait()
                shard.in_flight = None
        if self.trace is not None:
            self._pop(params)
            self._prefetch()
        self.step += 1

    def _pop(self, params: Sequence[Sharded]) -> None:
        late = {shard.order for shard in params if shard.last_used < self.step}
        seen: set[int] = set()
        while self.queue and len(seen) < len(late):
            order, step = self.queue.popleft()
            self._shard(order).last_used = step
            seen.add(order)

    def _shard(self, order: int) -> Sharded:
        return self.by_order[order]

    def _prefetch(self) -> None:
        room = min(self.options.stage3_max_live_parameters - self.live, self.options.stage3_prefetch_bucket_size)
        chosen: dict[int, Sharded] = {}
        elements = 0
        while self.options.stage3_prefetch_bucket_size and self.queue and elements < room:
            order, step = self.queue.popleft()
            shard = self._shard(order)
            shard.last_used = max(shard.last_used, step)
            if not shard.available and shard.in_flight is None and order not in chosen:
                chosen[order] = shard
                elements += shard.numel
        self._gather([chosen[order] for order in sorted(chosen)])

    def _gather(self, shards: Sequence[Sharded]) -> None:
        if shards:
            self.live += sum(shard.numel for shard in shards)
            gather = Gather(self.tape, sorted(shards, key=lambda shard: shard.order))
            for shard in shards:
                shard.in_flight = gather
                whole = shard.chunk * shard.ranks * shard.parameter.dtype.itemsize
                traffic.gather(self.tape, whole, shard.ranks)

    def release(
        self, module: object, params: Sequence[Sharded], own: Sequence[Sharded], *, backward: bool = False
    ) -> None:
        """Free a submodule's weights, unless they are used again soon."""
        if backward:
            self.in_backward = [entry for entry in self.in_backward if entry[0] is not module]
        going = self._released(own)
        for shard in params:
            shard.active.discard(id(module))
            if shard.order in going:
                self._free(shard)

    def _released(self, own: Sequence[Sharded]) -> set[int]:
        if self.trace is None:
            return {shard.order for shard in own if not shard.persists}
        going = {shard.order for shard in own if not shard.persists and shard.last_used <= self.step}
        passed = 0
        for use in self.trace.uses[self.step :]:
            if not going or passed >= self.options.stage3_max_reuse_distance:
                break
            for order in use:
                going.discard(order)
                passed += self._shard(order).numel
        return going

    def _free(self, shard: Sharded) -> None:
        if shard.available and not shard.active and not shard.persists:
            shard.free(self.tape)
            shard.available = False
            self.live -= shard.numel

    def reset(self) -> None:
        """Backward is over: release what is in flight, and submodules whose inputs needed no gradient."""
        for shard in self.by_order.values():
            if shard.in_flight is not None:
                shard.in_flight.wait()
                shard.in_flight = None
            shard.active.clear()
            self._free(shard)
