"""GRADIENTS: of the weights that are trained. In backward they appear one by one, on the tape."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from memcalc.autograd.graph import AccumulateGrad
from memcalc.common.sizes import rounded
from memcalc.setup.setup import TrainingSetup

if TYPE_CHECKING:
    from memcalc.training.step import Step


def gradients(step: Step, phase: str) -> Iterator[tuple[str, int]]:
    """All of them in the optimizer step; with accumulation they stand through forward and backward too.

    An optimizer that steps in backward leaves none.
    """
    setup = step.setup
    if not isinstance(setup, TrainingSetup) or step.steps_in_backward:
        return
    if phase == "step" or setup.grad_accum > 1:
        yield "gradients of trained weights", sum(_sizes(step))


def _sizes(step: Step) -> Iterator[int]:
    """Bytes of each gradient; those that are views of one larger tensor (of a class token) keep it, once."""
    seen: set[int] = set()
    for _, parameter in step.parameters:
        if not parameter.reached:
            continue
        held = parameter.node.held if isinstance(parameter.node, AccumulateGrad) else None
        if held is None:
            yield rounded(parameter.numel * parameter.dtype.itemsize) * parameter.copies
        elif id(held) not in seen:
            seen.add(id(held))
            yield held.nbytes * parameter.copies
