"""A piece that stands for many equal ones, with each of which a loop does the same (`nn/layers/equal_pieces.py`)."""

from __future__ import annotations

from memcalc.autograd.graph import Grads, Node, record
from memcalc.autograd.tensor import Tensor, dense_stride
from memcalc.common.sizes import Shape
from memcalc.ops.views import _alias


def first_of(x: Tensor, dim: int, count: int) -> Tensor:
    """The first of `count` equal pieces of `x` along `dim`, a view; backward makes the gradients of all of them."""
    dim %= len(x.shape)
    out = _alias(x, _resized(x.shape, dim, x.shape[dim] // count), x.stride)
    record(x.tape, out, _first_of_backward, (x,), (dim, count))
    return out


def _first_of_backward(node: Node, grads: Grads) -> list[Tensor | None]:
    (grad,) = grads
    if grad is None:
        return [None]
    dim, count = node.context
    shape = _resized(grad.shape, dim, grad.shape[dim] * count)
    apart = tuple(step * count if step > grad.stride[dim] else step for step in grad.stride)
    every = node.tape.empty(shape, grad.dtype, dense_stride(shape, apart))
    every.storage.allocation.nbytes = grad.storage.allocation.nbytes * count
    return [every]


def as_many(x: Tensor, dim: int, count: int) -> Tensor:
    """`x` as `count` pieces like it, one after another along `dim`; its gradient is a view of theirs."""
    if count == 1:
        return x
    dim %= len(x.shape)
    apart = tuple(step * count if step > x.stride[dim] else step for step in x.stride)
    out = _alias(x, _resized(x.shape, dim, x.shape[dim] * count), apart)
    record(x.tape, out, _as_many_backward, (x,), x.shape)
    return out


def _as_many_backward(node: Node, grads: Grads) -> list[Tensor | None]:
    (grad,) = grads
    return [None if grad is None else _alias(grad, node.context, grad.stride)]


def _resized(shape: Shape, dim: int, size: int) -> Shape:
    return (*shape[:dim], size, *shape[dim + 1 :])
