"""A run whose batches have many lengths: every step asks for blocks of other sizes, so what is reserved grows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from memcalc.allocator.events import Events, RunEvents
from memcalc.allocator.optimizer_events import update
from memcalc.allocator.training_events import MicroBatch, batch, loaded_models, loop_scalars
from memcalc.training.traced_step import Step

TraceLength = Callable[[int, bool, bool], Step]
"""Traces a micro-batch of so many tokens: whether gradients exist, and whether every block is traced."""


class _MicroBatches:
    """The events of micro-batches, each length traced once."""

    def __init__(self, trace: TraceLength, scalars: Mapping[str, int]) -> None:
        self._trace = trace
        self._scalars = scalars
        self._written: dict[tuple[int, bool, bool], tuple[Events, Events, list[int]]] = {}

    def written(self, length: int, *, accumulated: bool, warm: bool) -> tuple[Events, Events, list[int]]:
        """Inputs and events of a micro-batch, and the numbers of its gradients."""
        key = length, accumulated, warm
        if key not in self._written:
            micro = MicroBatch(lambda later, every: self._trace(length, later, every), accumulated)
            events = Events()
            gradients = micro.append_to(events, warm=warm, scalars={} if accumulated else self._scalars)
            self._written[key] = batch(micro.step), events, gradients
        return self._written[key]


def run_events(trace: TraceLength, lengths: Sequence[Sequence[int]], workspace: int) -> RunEvents:
    """The events of steps whose micro-batches have these lengths."""
    longest = trace(max(map(max, lengths)), False, False)
    micro_batches = _MicroBatches(trace, loop_scalars(longest))
    first, later = update(longest, first=True), update(longest, first=False)
    steps = []
    for number, step in enumerate(lengths):
        inputs, events, gradients = Events(), Events(), list[int]()
        for place, length in enumerate(step):
            accumulated = place > 0
            theirs, forward_backward, made = micro_batches.written(
                length, accumulated=accumulated, warm=accumulated or number > 0
            )
            inputs.append(theirs)
            start = events.append(forward_backward)
            gradients += [start + gradient for gradient in made]
        events.append(later if number else first)
        for gradient in gradients:
            events.free(gradient)
        steps.append((inputs, events))
    return RunEvents(loaded_models(longest), tuple(steps), workspace)
