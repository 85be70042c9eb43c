"""Functions that bring their own backward (torch.autograd.Function): they keep their input, the rest comes again."""

from __future__ import annotations

from collections.abc import Callable

from memcalc.autograd.graph import Grads, Node, record
from memcalc.autograd.tensor import Tensor


def autograd_function(
    x: Tensor, forward: Callable[[Tensor], Tensor], backward: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """forward(x), outside the graph; its gradient is backward(gradient, x)."""
    with x.tape.no_grad():
        out = forward(x.detach())
    node = record(x.tape, out, _function_backward, (x,), backward)
    if node is not None:
        node.save(x)
    return out


def _function_backward(node: Node, grads: Grads) -> list[Tensor | None]:
    (grad,) = grads
    return [None if grad is None else node.context(grad, grad.detach())]  # x has the gradient's shape and dtype


def routed_multiplier(scores: Tensor, multiplier: Tensor, chosen: Tensor, gates: Tensor) -> Tensor:
    """The multiplier [n, 1] times a factor (PhiMoE): keeps the multiplier, the experts `chosen` and the gates.

    Its gradient goes to `scores` [n, experts] alone.
    """
    tape = scores.tape
    out = tape.empty(multiplier.shape, multiplier.dtype)
    node = record(tape, out, _routed_backward, (scores, multiplier, gates), gates.shape)
    if node is not None:
        for kept in (multiplier, chosen, gates):
            node.save(kept)
    return out


def _routed_backward(node: Node, grads: Grads) -> list[Tensor | None]:
    (grad,) = grads
    if grad is None:
        return [None, None, None]
    scaled = node.tape.empty(grad.shape, grad.dtype)
    negated = node.tape.empty(grad.shape, grad.dtype)
    out = node.tape.empty(node.context, grad.dtype)
    del scaled, negated
    return [out, None, None]
