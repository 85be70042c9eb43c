"""Element-wise operations whose gradient depends on where the input lies.

Source: tools/autograd/derivatives.yaml and torch/csrc/autograd/FunctionsManual.cpp of PyTorch 2.14.
"""

from __future__ import annotations

from memcalc.model.autograd import Grads, Node, record
from memcalc.model.ops.elementwise import like
from memcalc.model.ops.views import clone
from memcalc.model.tensor import Tensor
from memcalc.tables.dtypes import BOOL


def clamp(x: Tensor, bounds: int = 2) -> Tensor:
    """x kept within one bound or two: keeps x; backward makes a zero, a mask for each bound, and the gradient."""
    out = like(x)
    node = record(x.tape, out, _clamp_backward, (x,), bounds)
    if node is not None:
        node.save(x.storage)
    return out


def clamp_(x: Tensor, *, of_view: bool = False) -> Tensor:
    """x kept within two bounds, in place: keeps a copy of x as it was.

    Where x is a view (`of_view`: what a linear layer with a bias returns), backward copies the gradient of the whole
    first, and then the part of it that it changes.
    """
    before = clone(x.detach()) if x.tape.grad_enabled and x.requires_grad else None
    out = Tensor(x.shape, x.stride, x.dtype, x.storage, x.node, x.slot)
    node = record(x.tape, out, _clamp_view_backward if of_view else _clamp_backward, (x,), 2)
    if node is not None and before is not None:
        node.save(before.storage)
    return out


def _clamp_view_backward(node: Node, grads: Grads) -> list[Tensor | None]:
    (grad,) = grads
    if grad is None:
        return [None]
    whole = like(grad)
    part = like(grad)
    changed = _clamp_backward(node, [part])
    del part, changed
    return [whole]


def _clamp_backward(node: Node, grads: Grads) -> list[Tensor | None]:
    (grad,) = grads
    if grad is None:
        return [None]
    zero = node.tape.new((), grad.dtype)
    inside = [like(grad, BOOL) for _ in range(node.context)]
    out = like(grad)
    inside.clear()
    del zero
    return [out]
