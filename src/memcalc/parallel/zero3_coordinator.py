"""When ZeRO stage 3 gathers, prefetches and releases the weights of submodules.

Source: deepspeed/runtime/zero/partitioned_param_coordinator.py of DeepSpeed 0.19.6. From the second step on it knows
the order of submodules from the step before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from memcalc.autograd.tape import Tape
from memcalc.parallel import traffic
from memcalc.parallel.setup import ZeroOptions
from memcalc.parallel.zero3_shards import Gather, Sharded

Use = tuple[str, tuple[int, ...]]
"""A submodule's name and its weights, by their place in the model."""


class Named(Protocol):
    """A submodule: its name in the model, empty for the model itself."""

    name: str


@dataclass(frozen=True, eq=False)
class Recorded:
    """What a coordinator knows when a step is over.

    uses: the trace that the next pass follows, submodule after submodule; None if it has to be recorded.
    external: weights that are read past their modules.
    """

    uses: tuple[Use, ...] | None
    external: frozenset[int]


class Coordinator:
    """PartitionedParameterCoordinator, for one step.

    A trace begins with a forward pass of the whole model and ends with the next: it is backward too where one pass
    forward leads to one backward. A submodule that is not the one that the trace has next makes the trace invalid.
    """

    def __init__(self, tape: Tape, options: ZeroOptions, before: Recorded | None, shards: Sequence[Sharded]) -> None:
        """before: what is known from the step before."""
        self.tape = tape
        self.options = options
        self.trace = None if before is None else before.uses
        self.recording = False
        self.runs = False
        """Whether the model is in its forward pass."""
        self.step = 0
        self.live = 0
        """Elements gathered now (`n_available_params`)."""
        self.by_order = dict(enumerate(shards))
        for order, shard in self.by_order.items():
            shard.order = order
            shard.external = before is not None and order in before.external
        self.queue: deque[tuple[int, int]] = deque()
        self._uses: list[tuple[str, tuple[Sharded, ...]]] = []
        self.in_backward: list[tuple[object, tuple[Sharded, ...]]] = []

    @property
    def recorded(self) -> Recorded:
        """What the next step begins with."""
        external = frozenset(order for order, shard in self.by_order.items() if shard.external)
        return Recorded(self._complete() if self.recording else self.trace, external)

    def _complete(self) -> tuple[Use, ...]:
        """The trace of what was recorded; the model's own weights are those that it has by now."""
        external = {order for order, shard in self.by_order.items() if shard.external}
        own = ((name, {shard.order for shard in params} | (set() if name else external)) for name, params in self._uses)
        return tuple((name, tuple(sorted(orders))) for name, orders in own)

    def begin(self) -> None:
        """A forward pass of the whole model begins (`reset_step`)."""
        self._land()
        self.runs = True
        if self.recording:
            self.trace = self._complete()
        self.recording = self.trace is None
        self._uses = []
        self.step = self.live = 0
        self.queue = deque((order, step) for step, (_, use) in enumerate(self.trace or ()) for order in use)
        for shard in self.by_order.values():
            shard.last_used = -1

    def _check(self, name: str) -> None:
        """Drop the trace if another submodule is next in it (`trace_prologue`)."""
        if self.trace is not None and (self.step >= len(self.trace) or self.trace[self.step][0] != name):
            self.trace = None
            self.queue.clear()
            self._land()

    def fetch(self, module: Named, params: tuple[Sharded, ...], *, backward: bool = False) -> None:
        """Gather the weights of a submodule, wait for them, and issue the gathering of those that come next."""
        self._check(module.name)
        if self.recording:
            self._uses.append((module.name, params))
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
                self._free(shard, small=True)

    def _released(self, own: Sequence[Sharded]) -> set[int]:
        if self.trace is None:
            return {shard.order for shard in own}
        going = {shard.order for shard in own if not shard.persists and shard.last_used <= self.step}
        passed = 0
        for _, use in self.trace[self.step :]:
            if not going or passed >= self.options.stage3_max_reuse_distance:
                break
            for order in use:
                going.discard(order)
                passed += self._shard(order).numel
        return going

    def _free(self, shard: Sharded, *, small: bool = False) -> None:
        stays = shard.fixed if small else shard.persists
        if shard.available and not shard.active and not stays:
            shard.free(self.tape)
            shard.available = False
            self.live -= shard.numel

    def reset(self) -> None:
        """Backward is over: release what is in flight, and submodules whose inputs needed no gradient."""
        self._land()
        for shard in self.by_order.values():
            shard.active.clear()
            self._free(shard)

    def _land(self) -> None:
        """Wait for what was gathered ahead and never used, and free it."""
        for shard in self.by_order.values():
            if shard.in_flight is not None:
                shard.in_flight.wait()
                shard.in_flight = None
                self._free(shard)
