"""What the optimizer asks of the allocator when it steps: norms of gradients, its states, its temporaries."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain

from memcalc.allocator.events import Events
from memcalc.allocator.loading import every_tensor
from memcalc.autograd.reduce_kernel import rows_scratch
from memcalc.optim.weight import Weight
from memcalc.setup.setup import TrainingSetup
from memcalc.training.traced_step import Step
from memcalc.training.trainer_loop import clips, partial_sums


def update(step: Step, *, first: bool) -> Events:
    """The optimizer's step after a traced micro-batch. In the first one it makes its states, which stay."""
    events = Events()
    events.begin("step")
    assert step.optimizer is not None
    assert isinstance(step.setup, TrainingSetup)
    weights = _one_by_one(step)
    if clips(step.setup):
        _clip(events, weights)
    step_over(events, step, weights, first=first)
    return events


def step_over(events: Events, step: Step, weights: Sequence[Weight], *, first: bool) -> None:
    """Step over these weights. In the first step their states are made, which stay."""
    assert step.optimizer is not None
    if first:
        _make_states(events, step, weights)
    offset = events.count
    codes = step.optimizer.step[step.implementation].codes(weights, rows_scratch(step.tape.device))
    events.codes += [code if code > 0 else code - offset for code in codes]
    events.count += sum(code > 0 for code in codes)


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
