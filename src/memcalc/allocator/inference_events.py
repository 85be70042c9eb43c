"""What generation asks of the allocator: its model, its prompt, then prefill and tokens, again and again."""

from __future__ import annotations

from collections.abc import Callable

from memcalc.allocator.events import Events, JobEvents
from memcalc.allocator.training_events import batch
from memcalc.allocator.unrolled import NotUniformError, Unrolled
from memcalc.nn.module import Module
from memcalc.training.traced_step import Step

TOKENS = 8
"""Tokens that are decoded between the prompt and the last one, at most: evenly spread over all of them.

Every token takes keys and values that are one longer. Of 200 tokens of an 8B model, eight reserve what all do within
0.1 %.
"""


def decoded_tokens(count: int) -> tuple[int, ...]:
    """Which tokens of so many are decoded one by one beside the last, counted from 1."""
    before = count - 1
    chosen = min(TOKENS, before)
    return tuple(1 + index * before // chosen for index in range(chosen))


def inference_events(trace: Callable[[bool], Step], workspace: int, load: Callable[[Module], Events]) -> JobEvents:
    """The events of a generation that `trace` traces, with every block where it is told so.

    The cache goes before the next prompt comes, which asks for what the first one did, workspaces excepted.
    """
    step = trace(False)
    events = Events()
    try:
        Unrolled(step.tape, set()).append_to(events)
    except NotUniformError:
        events = Events()
        Unrolled(trace(True).tape, set()).append_to(events)
    return JobEvents(load(step.network), batch(step), events, events, workspace)
