"""The box, one file a row. Each says what stands in its row during a phase, besides what the tape holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from memcalc.autograd.tape import ACTIVATIONS, GRADIENTS, OPTIMIZER, OVERHEAD, TEMPORARY, WEIGHTS
from memcalc.breakdown.activations import activations
from memcalc.breakdown.gradients import gradients
from memcalc.breakdown.model_weights import model_weights
from memcalc.breakdown.optimizer_states import optimizer_states
from memcalc.breakdown.other_overhead import other_overhead
from memcalc.breakdown.temporary_tensors import temporary_tensors

if TYPE_CHECKING:
    from memcalc.training.traced_step import Step

Part = tuple[str, int]
"""Name and bytes of one part of a row."""

BREAKDOWN: dict[str, Callable[[Step, str], Iterator[Part]]] = {
    WEIGHTS: model_weights,
    OPTIMIZER: optimizer_states,
    GRADIENTS: gradients,
    ACTIVATIONS: activations,
    TEMPORARY: temporary_tensors,
    OVERHEAD: other_overhead,
}
"""The six rows in the order of the box."""


def standing(step: Step, phase: str) -> int:
    """Bytes that stand during `phase` outside the tape, over all rows."""
    return sum(nbytes for row in BREAKDOWN.values() for _, nbytes in row(step, phase))
