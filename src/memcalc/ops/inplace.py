"""In-place operations: no new tensor, but what autograd has to keep of the old values.

Source: torch/csrc/autograd/{VariableTypeManual,functions/tensor}.cpp of PyTorch 2.14.
"""

from __future__ import annotations

from memcalc.autograd.graph import Grads, Node, record
from memcalc.autograd.tensor import Tensor
from memcalc.ops.elementwise import div_backward, empty_like, to
from memcalc.ops.unary import backward_temporaries
from memcalc.ops.views import clone, narrow, narrow_backward


def rebased(x: Tensor) -> Tensor:
    """The storage of x under a new node to come."""
    return Tensor(x.shape, x.stride, x.dtype, x.storage, x.node, x.slot)


def mul_scalar_(x: Tensor) -> Tensor:
    """x times or divided by a number, in place."""
    out = rebased(x)
    record(x.tape, out, backward_temporaries(1), (x,))
    return out


def mul_(x: Tensor, factor: Tensor) -> Tensor:
    """x times `factor`, which needs no gradient, in place: keeps the factor."""
    out = rebased(x)
    node = record(x.tape, out, backward_temporaries(1), (x,))
    if node is not None:
        node.save(factor)
    return out


def mul_slice_(x: Tensor, dim: int, length: int) -> tuple[Tensor, Tensor]:
    """`length` elements of x along `dim` times or divided by a number, in place: x and the slice, as they are then.

    Backward copies the whole gradient, and the slice of it, which it scales.
    """
    whole = rebased(x)
    shape = (*x.shape[:dim], length, *x.shape[dim + 1 :])
    record(x.tape, whole, _mul_slice_backward, (x,), shape)
    return whole, narrow(whole, dim, length)


def _mul_slice_backward(node: Node, grads: Grads) -> list[Tensor | None]:
    (grad,) = grads
    if grad is None:
        return [None]
    whole = empty_like(grad)
    part = node.tape.empty(node.context, grad.dtype)
    scaled = empty_like(part)
    del part, scaled
    return [whole]


def div_(a: Tensor, b: Tensor) -> Tensor:
    """a /= b: keeps b, and a copy of a as it was if b needs a gradient."""
    before = clone(a.detach()) if a.tape.grad_enabled and b.requires_grad else None
    out = rebased(a)
    node = record(a.tape, out, div_backward, (a, b))
    if node is not None:
        if before is not None:
            node.save(before)
        node.save(b)
    return out


def add_view_(x: Tensor, view: Tensor, addend: Tensor) -> tuple[Tensor, Tensor]:
    """`addend` added in place to `view`, a view of x: x and the view, as they are then.

    Backward copies the whole gradient, and then the part of it under the view; the gradient of the view as it is then
    is a zero-filled tensor of the size of x.
    """
    whole = rebased(x)
    record(x.tape, whole, _add_view_backward, (x, addend), view.shape)
    seen = Tensor(view.shape, view.stride, x.dtype, x.storage, is_view=True)
    record(x.tape, seen, narrow_backward, (whole,), x.shape)
    return whole, seen


def _add_view_backward(node: Node, grads: Grads) -> list[Tensor | None]:
    (grad,) = grads
    if grad is None:
        return [None, None]
    whole = empty_like(grad)
    part = node.tape.empty(node.context, grad.dtype)
    return [whole if node.needs(0) else None, part if node.needs(1) else None]


def copy_slice_(x: Tensor, piece: Tensor) -> Tensor:
    """x with `piece` copied into some slice of it, in place: x as it is afterwards.

    Backward copies the whole gradient, and then the slice of it; where x itself needs one, the slice is zeroed.
    """
    out = rebased(x)
    record(x.tape, out, _copy_slice_backward, (x, piece), (piece.shape, piece.dtype))
    return out


def _copy_slice_backward(node: Node, grads: Grads) -> list[Tensor | None]:
    (grad,) = grads
    if grad is None:
        return [None, None]
    shape, dtype = node.context
    whole = empty_like(grad)
    of_slice = node.tape.empty(shape, grad.dtype)
    of_piece = to(of_slice, dtype)
    if not node.needs(0):
        return [None, of_piece]
    zeros = node.tape.empty(shape, grad.dtype)
    del zeros
    return [whole, of_piece if node.needs(1) else None]
