"""What a training job asks of the allocator: its model, its batch, its first optimizer step and those that follow."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain

from memcalc.allocator.events import Events, JobEvents
from memcalc.allocator.loading import every_tensor, moved
from memcalc.allocator.unrolled import NotUniformError, Unrolled
from memcalc.autograd.graph import AccumulateGrad
from memcalc.autograd.reduce_kernel import rows_scratch
from memcalc.common.sizes import ALIGNMENT
from memcalc.nn.module import Module
from memcalc.optim.weight import Weight
from memcalc.setup.setup import TrainingSetup
from memcalc.training.traced_step import Step
from memcalc.training.trainer_loop import clips, partial_sums, runs_trainer, scalar_bytes

MOST_MICRO_BATCHES = 3
"""Micro-batches of a step that are simulated: what the third one meets is what all later ones meet."""


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

    def append_to(self, events: Events, *, warm: bool, scalars: Mapping[str, int]) -> list[int]:
        """Write the events; `warm` says that cuBLAS has its workspaces. Returns the numbers of gradients."""
        mark = len(events.codes), events.count, list(events.phases)
        try:
            return unrolled(self.step).append_to(events, warm=warm, scalars=scalars)
        except NotUniformError:
            del events.codes[mark[0] :]
            events.count, events.phases = mark[1], mark[2]
            return unrolled(self.trace(self.accumulated, True)).append_to(events, warm=warm, scalars=scalars)


def unrolled(step: Step) -> Unrolled:
    """The events of the tape of a micro-batch. The gradients of weights outlive it, and what the trainer holds."""
    nodes = [parameter.node for _, parameter in step.parameters]
    gradients = [node.gradient for node in nodes if isinstance(node, AccumulateGrad) and node.gradient is not None]
    held = {id(gradient.storage.allocation) for gradient in gradients}
    return Unrolled(step.tape, held | {id(allocation) for allocation in step.held_until_step})


def training_events(
    trace_step: TraceStep, micro_batches: int, workspace: int, load: Callable[[Module], Events] = moved
) -> JobEvents:
    """The events of a job whose steps have so many micro-batches."""
    parts = [_Micro(trace_step, accumulated=False)]
    if micro_batches > 1:
        later = _Micro(trace_step, accumulated=True)
        parts += [later] * (min(micro_batches, MOST_MICRO_BATCHES) - 1)
    step = parts[0].step
    assert isinstance(step.setup, TrainingSetup)
    together = micro_batches if runs_trainer(step.setup) else 1
    return JobEvents(
        _loaded(step, load),
        batch(step, together),
        _step(parts, step, first=True),
        _step(parts, step, first=False),
        workspace,
    )


def _loaded(step: Step, load: Callable[[Module], Events]) -> Events:
    """All models of the job, that of the step first."""
    events = load(step.network)
    for model in step.companions:
        events.append(load(model))
    return events


def batch(step: Step, count: int = 1) -> Events:
    """The inputs of so many micro-batches: Trainer has those of a whole step at once."""
    events = Events()
    for _ in range(count):
        for allocation in step.tape.inputs:
            if allocation.raw_nbytes > 0:
                events.malloc(allocation.raw_nbytes)
    return events


def _step(parts: Iterable[_Micro], step: Step, *, first: bool) -> Events:
    """Every micro-batch, then the optimizer, which makes its states in the first step; at last gradients go."""
    events = Events()
    gradients: list[int] = []
    assert isinstance(step.setup, TrainingSetup)
    scalars = _scalars(step.setup)
    for part in parts:
        gradients += part.append_to(events, warm=bool(gradients), scalars=scalars if not gradients else {})
    events.begin("step")
    assert step.optimizer is not None
    weights = _one_by_one(step)
    if clips(step.setup):
        _clip(events, weights)
    if first:
        _make_states(events, step, weights)
    offset = events.count
    codes = step.optimizer.step[step.implementation].codes(weights, rows_scratch(step.tape.device))
    events.codes += [code if code > 0 else code - offset for code in codes]
    events.count += sum(code > 0 for code in codes)
    for number in gradients:
        events.free(number)
    return events


def _scalars(setup: TrainingSetup) -> dict[str, int]:
    """How many tensors of one element the training loop makes as each phase begins."""
    forward, backward = (scalar_bytes(setup, phase) // ALIGNMENT for phase in ("forward", "backward"))
    return {"forward": forward, "backward": backward - forward}


def _clip(events: Events, weights: Iterable[Weight]) -> None:
    """Clip the gradients: a norm for each, with partial sums of those of one dtype, and the norm of all norms."""
    groups: dict[int, list[tuple[int, int]]] = {}
    for weight in weights:
        groups.setdefault(weight.itemsize, []).append((weight.count, 1))
    norms: list[int] = []
    for sizes in groups.values():
        norms += [events.malloc(4) for _ in sizes]
        events.free(events.malloc(partial_sums(sizes)))
    if norms:
        for number in [events.malloc(4 * len(norms)), events.malloc(4), *norms]:
            events.free(number)


def _one_by_one(step: Step) -> list[Weight]:
    """The trained weights, each for itself, in the order of updates."""
    reached = [parameter for _, parameter in step.tensors if parameter.reached]
    weights = {id(parameter): replace(w, copies=1) for parameter, w in zip(reached, step.trained, strict=True)}
    seen: set[int] = set()
    tensors = chain.from_iterable(every_tensor(model, seen) for model in (step.network, *step.companions))
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
