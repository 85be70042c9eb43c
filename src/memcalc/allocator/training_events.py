"""What a training job asks of the allocator: its model, its batch, its first optimizer step and those that follow."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from memcalc.allocator.events import Events, JobEvents
from memcalc.allocator.loading import every_tensor, moved, whole_bytes
from memcalc.allocator.optimizer_events import update
from memcalc.allocator.unrolled import NotUniformError, Unrolled
from memcalc.autograd.graph import AccumulateGrad
from memcalc.common.sizes import ALIGNMENT
from memcalc.nn.module import Buffer, Module
from memcalc.setup.setup import TrainingSetup
from memcalc.training.traced_step import Step
from memcalc.training.trainer_loop import runs_trainer, scalar_bytes

ZERO = ("zero1", "zero2", "zero3")
"""Engines whose optimizer steps over flat tensors."""
MOST_MICRO_BATCHES = 3
"""Micro-batches of a step that are simulated: what the third one meets is what all later ones meet."""


TraceStep = Callable[[bool, bool], Step]
"""Traces a micro-batch: whether gradients of earlier ones exist, and whether every block is traced."""


@dataclass(frozen=True)
class MicroBatch:
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
    others = (*step.held_until_step, *(() if step.engine is None else step.engine.held))
    return Unrolled(step.tape, held | {id(allocation) for allocation in others})


def training_events(
    trace_step: TraceStep, micro_batches: int, workspace: int, load: Callable[[Module], Events] = moved
) -> JobEvents:
    """The events of a job whose steps have so many micro-batches."""
    parts = [MicroBatch(trace_step, accumulated=False)]
    if micro_batches > 1:
        later = MicroBatch(trace_step, accumulated=True)
        parts += [later] * (min(micro_batches, MOST_MICRO_BATCHES) - 1)
    step = parts[0].step
    assert isinstance(step.setup, TrainingSetup)
    together = micro_batches if runs_trainer(step.setup) else 1
    events, gradients = _micro_batches(parts, step)
    first = (events, gradients) if step.first_run is None else _first_run(parts[0], step.first_run)
    job = JobEvents(
        loaded_models(step, load),
        batch(step, together),
        _with_update(*first, step, first=True),
        _with_update(events, gradients, step, first=False),
        workspace,
        streams=any(allocation.stream for allocation in step.tape.allocations),
    )
    if step.engine is not None:
        from memcalc.allocator.several_gpus import with_engine  # jobs on one GPU do not pay for it

        return with_engine(job, step, step.engine)
    return job


def loaded_models(step: Step, load: Callable[[Module], Events] = moved) -> Events:
    """All models of the job, that of the step first."""
    events = load(step.network)
    for model in step.companions:
        events.append(load(model))
    if isinstance(step.setup, TrainingSetup) and step.setup.use_ema:
        for tensor, again in every_tensor(step.network):
            if not again and not isinstance(tensor, Buffer):
                events.malloc(whole_bytes(tensor))
    return events


def batch(step: Step, count: int = 1) -> Events:
    """The inputs of so many micro-batches: Trainer has those of a whole step at once."""
    events = Events()
    for _ in range(count):
        for allocation in step.tape.inputs:
            if allocation.raw_nbytes > 0:
                events.malloc(allocation.raw_nbytes)
    return events


def _micro_batches(parts: Iterable[MicroBatch], step: Step) -> tuple[Events, list[int]]:
    """Every micro-batch of a step, and the numbers of their gradients.

    Those of later steps ask for the same: where cuBLAS has its workspaces, `WORKSPACE` asks for nothing.
    """
    events = Events()
    gradients: list[int] = []
    scalars = loop_scalars(step)
    for part in parts:
        gradients += part.append_to(events, warm=bool(gradients), scalars=scalars if not gradients else {})
    return events, gradients


def _first_run(part: MicroBatch, first: Step) -> tuple[Events, list[int]]:
    """The micro-batch of the first step, where later ones run otherwise."""
    events = Events()
    try:
        return events, unrolled(first).append_to(events, scalars=loop_scalars(first))
    except NotUniformError:
        whole = part.trace(False, True).first_run
        assert whole is not None
        events = Events()
        return events, unrolled(whole).append_to(events, scalars=loop_scalars(first))


def _with_update(micro_batches: Events, gradients: Sequence[int], step: Step, *, first: bool) -> Events:
    """Micro-batches, then the optimizer; at last gradients go."""
    events = Events()
    events.append(micro_batches)
    if step.engine is not None and step.engine.layout.engine in ZERO:
        from memcalc.allocator.zero import zero_update

        zero_update(events, gradients, step, first=first)
        return events
    events.append(update(step, first=first))
    for number in gradients:
        events.free(number)
    return events


def loop_scalars(step: Step) -> dict[str, int]:
    """How many tensors of one element the training loop makes as each phase begins."""
    assert isinstance(step.setup, TrainingSetup)
    forward, backward = (scalar_bytes(step.setup, phase) // ALIGNMENT for phase in ("forward", "backward"))
    losses = 0 if step.engine is None else step.engine.LOSSES
    return {"forward": forward, "backward": backward - forward + losses}
