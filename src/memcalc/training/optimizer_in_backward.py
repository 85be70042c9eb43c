"""Optimizers that step each weight during backward, so that gradients do not pile up."""

from __future__ import annotations

from functools import partial

from memcalc.autograd.graph import AccumulateGrad
from memcalc.autograd.tape import TEMPORARY, Tape
from memcalc.nn.module import Buffer, Module
from memcalc.optim.weight import Temporaries, Weight

_SCOPE = "optimizer step of one weight"


class StepOnGradient:
    """Step a weight when its gradient is there, and free the gradient (`register_post_accumulate_grad_hook`)."""

    def __init__(self, tape: Tape, step: Temporaries) -> None:
        self.tape = tape
        self.step = step

    def post_accumulate_hook(self, weight: Weight, node: AccumulateGrad) -> None:
        """The gradient of `weight` has been accumulated in `node`."""
        scratch = self.tape.allocate(self.step([weight]), TEMPORARY, _SCOPE)
        del scratch
        node.gradient = None

    def finish(self) -> None:
        """Backward is over."""


class StepOnNextGradient(StepOnGradient):
    """Step a weight when the next one's gradient comes, as LOMO's tensor hooks do: two gradients are alive for a while.

    A 16-bit gradient is freed once its fp32 copy exists.
    """

    def __init__(self, tape: Tape, step: Temporaries) -> None:
        super().__init__(tape, step)
        self.pending: tuple[AccumulateGrad, Weight] | None = None

    def post_accumulate_hook(self, weight: Weight, node: AccumulateGrad) -> None:
        """The gradient of `weight` is there: the one before it is used up now."""
        self.finish()
        self.pending = node, weight

    def finish(self) -> None:
        """Step the weight that waits."""
        if self.pending is None:
            return
        node, weight = self.pending
        self.pending = None
        size = weight.sized(4) if weight.itemsize < 4 else 0
        copy = self.tape.allocate(size, TEMPORARY, _SCOPE) if size else None
        if size:
            node.gradient = None
        rest = self.tape.allocate(max(self.step([weight]) - size, 0), TEMPORARY, _SCOPE)
        del copy, rest
        node.gradient = None


def step_in_backward(network: Module, updater: StepOnGradient) -> None:
    """Give every trained weight of a bound network to `updater` when its gradient is there."""
    for _, parameter in network.tensors():
        node = parameter.node
        if isinstance(node, AccumulateGrad) and not isinstance(parameter, Buffer):
            weight = Weight(parameter.shape, parameter.dtype.itemsize, group=parameter.group)
            node.post_accumulate_hook = partial(updater.post_accumulate_hook, weight)
