"""What a training job asks of the allocator: its model, its batch, its first optimizer step and those that follow."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property

from memcalc.allocator.events import Events
from memcalc.allocator.loading import every_tensor, moved
from memcalc.allocator.unrolled import NotUniformError, Unrolled
from memcalc.autograd.graph import AccumulateGrad
from memcalc.autograd.reduce_kernel import rows_scratch
from memcalc.nn.module import Module
from memcalc.optim.weight import Weight
from memcalc.training.traced_step import Step

MOST_MICRO_BATCHES = 3
"""Micro-batches of a step that are simulated: what the third one meets is what all later ones meet."""


@dataclass(frozen=True)
class TrainingEvents:
    """A job on one GPU. `workspace` is the size of what cuBLAS asks for in each of two threads, in bytes."""

    loading: Events
    batch: Events
    first: Events
    later: Events
    workspace: int


TraceStep = Callable[[bool, bool], Step]
"""Traces a micro-batch: whether gradients of earlier ones exist, and whether every block is traced."""


@dataclass(frozen=True)
class _Micro:
    """A micro-batch whose tape becomes events, with every block traced where one cannot stand for others."""

    trace: TraceStep
    accumulated: bool

    @cached_property
    def step(self) -> Step:
        return self.trace(self.accumulated, False)

    def append_to(self, events: Events, *, warm: bool) -> list[int]:
        """Write the events; `warm` says that cuBLAS has its workspaces. Returns the numbers of gradients."""
        mark = len(events.codes), events.count, list(events.phases)
        try:
            return unrolled(self.step).append_to(events, warm=warm)
        except NotUniformError:
            del events.codes[mark[0] :]
            events.count, events.phases = mark[1], mark[2]
            return unrolled(self.trace(self.accumulated, True)).append_to(events, warm=warm)


def unrolled(step: Step) -> Unrolled:
    """The events of the tape of a micro-batch. The gradients of weights outlive it."""
    nodes = [parameter.node for _, parameter in step.parameters]
    gradients = [node.gradient for node in nodes if isinstance(node, AccumulateGrad) and node.gradient is not None]
    return Unrolled(step.tape, {id(gradient.storage.allocation) for gradient in gradients})


def training_events(
    trace_step: TraceStep, micro_batches: int, workspace: int, load: Callable[[Module], Events] = moved
) -> TrainingEvents:
    """The events of a job whose steps have so many micro-batches."""
    parts = [_Micro(trace_step, accumulated=False)]
    if micro_batches > 1:
        later = _Micro(trace_step, accumulated=True)
        parts += [later] * (min(micro_batches, MOST_MICRO_BATCHES) - 1)
    step = parts[0].step
    return TrainingEvents(
        load(step.network), _batch(step), _step(parts, step, first=True), _step(parts, step, first=False), workspace
    )


def _batch(step: Step) -> Events:
    events = Events()
    for allocation in step.tape.inputs:
        if allocation.raw_nbytes > 0:
            events.malloc(allocation.raw_nbytes)
    return events


def _step(parts: Iterable[_Micro], step: Step, *, first: bool) -> Events:
    """Every micro-batch, then the optimizer, which makes its states in the first step; at last gradients go."""
    events = Events()
    gradients: list[int] = []
    for part in parts:
        gradients += part.append_to(events, warm=bool(events.count))
    events.begin("step")
    assert step.optimizer is not None
    weights = _one_by_one(step)
    if first:
        _make_states(events, step, weights)
    offset = events.count
    codes = step.optimizer.step[step.implementation].codes(weights, rows_scratch(step.tape.device))
    events.codes += [code if code > 0 else code - offset for code in codes]
    events.count += sum(code > 0 for code in codes)
    for number in gradients:
        events.free(number)
    return events


def _one_by_one(step: Step) -> list[Weight]:
    """The trained weights, each for itself, in the order of updates."""
    reached = [parameter for _, parameter in step.tensors if parameter.reached]
    weights = {id(parameter): replace(w, copies=1) for parameter, w in zip(reached, step.trained, strict=True)}
    tensors = every_tensor(step.network)
    return [weights[id(tensor)] for tensor, again in tensors if not again and id(tensor) in weights]


def _make_states(events: Events, step: Step, weights: Iterable[Weight]) -> None:
    optimizer = step.optimizer
    assert optimizer is not None
    counted = step.implementation in optimizer.counter_on_device
    if optimizer.once:
        events.malloc(optimizer.once)
    for weight in weights:
        if counted:
            events.malloc(4)
        for nbytes in optimizer.states(weight).values():
            if nbytes:
                events.malloc(nbytes)
