"""A job run through the allocator, step by step, until nothing changes any more."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from memcalc.allocator.caching import CachingAllocator
from memcalc.allocator.conf import DEFAULT_CONF, AllocatorConf
from memcalc.allocator.events import Events, JobEvents, RunEvents
from memcalc.allocator.expandable import allocator_of
from memcalc.allocator.plain import PlainAllocator

MOST_STEPS = 8
"""Steps that are simulated at most, where each reserves more than the one before."""


@dataclass(frozen=True)
class StepPeaks:
    """The peaks of a step by phase, in bytes."""

    allocated: Mapping[str, int]
    reserved: Mapping[str, int]


@dataclass(frozen=True)
class Simulated:
    """What `torch.cuda.memory_stats()` would say of a run, in bytes.

    steps: the peaks of each, up to the one that leaves everything as an earlier one did. loaded: what is reserved once
    model and batch are there. segments: the most at once.
    """

    steps: tuple[StepPeaks, ...]
    loaded: int
    segments: int

    @property
    def allocated(self) -> int:
        """`max_memory_allocated()`."""
        return max(max(step.allocated.values()) for step in self.steps)

    @property
    def reserved(self) -> int:
        """`max_memory_reserved()`."""
        return max(max(step.reserved.values()) for step in self.steps)


def simulate(
    job: JobEvents | RunEvents,
    conf: AllocatorConf = DEFAULT_CONF,
    capacity: int | None = None,
    *,
    empty_cache: bool = False,
) -> Simulated:
    """Run a job on a device of `capacity` bytes, CUDA context excluded (None: without limit).

    `empty_cache` gives cached segments back once, after the first step, and in a run of many lengths after every step.
    Raises OutOfDeviceMemory.
    """
    allocator: CachingAllocator | PlainAllocator
    if conf != DEFAULT_CONF:
        allocator = allocator_of(conf, capacity)
    elif isinstance(job, JobEvents) and job.streams:
        from memcalc.allocator.streams import StreamsAllocator  # jobs on one GPU do not pay for it

        allocator = StreamsAllocator(capacity)
    else:
        allocator = PlainAllocator(capacity)
    _perform(allocator, job.loading)
    if isinstance(job, RunEvents):
        return _run(allocator, job, empty_cache=empty_cache)
    _perform(allocator, job.batch)
    loaded = allocator.reserved
    steps: list[StepPeaks] = []
    segments = 0
    seen: set[object] = set()
    while len(steps) < MOST_STEPS:
        first = not steps
        steps.append(_perform(allocator, job.first if first else job.later, job.workspace if first else 0))
        segments = max(segments, allocator.peak_segments)
        if first and empty_cache:
            allocator.empty_cache()
        state = allocator.free_sizes()
        if state in seen:
            break
        seen.add(state)
    return Simulated(tuple(steps), loaded, segments)


def _run(allocator: CachingAllocator | PlainAllocator, job: RunEvents, *, empty_cache: bool) -> Simulated:
    """Every step of a run. The inputs of a step go when those of the next one are there."""
    loaded = allocator.reserved
    steps: list[StepPeaks] = []
    inputs: list[Any] = []
    segments = 0
    for batch, events in job.steps:
        before, inputs = inputs, []
        allocator.run(batch.codes, inputs)
        allocator.run([~number for number in range(len(before))], before)
        steps.append(_perform(allocator, events, job.workspace))
        segments = max(segments, allocator.peak_segments)
        if empty_cache:
            allocator.empty_cache()
    return Simulated(tuple(steps), loaded, segments)


def _perform(allocator: CachingAllocator | PlainAllocator, events: Events, workspace: int = 0) -> StepPeaks:
    """Run events, on behalf of threads that have no workspace yet where its size is given."""
    live: list[Any] = []
    allocated: dict[str, int] = {}
    reserved: dict[str, int] = {}
    ends = [start for _, start in events.phases[1:]] + [len(events.codes)]
    phases = events.phases or [("", 0)]
    for (phase, start), end in zip(phases, ends, strict=True):
        allocator.reset_peaks()
        allocator.run(events.codes[start:end], live, workspace)
        allocated[phase] = max(allocated.get(phase, 0), allocator.peak_allocated)
        reserved[phase] = max(reserved.get(phase, 0), allocator.peak_reserved)
    return StepPeaks(allocated, reserved)
