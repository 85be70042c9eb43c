"""ACTIVATIONS: what autograd keeps for backward. All of them are on the tape, until backward is over."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from memcalc.nn.retained_graphs import NAME
from memcalc.nn.run_context import run_context

if TYPE_CHECKING:
    from memcalc.training.traced_step import Step


def activations(step: Step, phase: str) -> Iterator[tuple[str, int]]:
    """In the optimizer's step, what modules go on keeping."""
    if phase == "step" and run_context(step.tape).retained_bytes:
        yield NAME, run_context(step.tape).retained_bytes
