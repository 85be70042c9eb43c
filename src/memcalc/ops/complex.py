"""Complex numbers: pairs of fp32 or fp64 seen as one element, as complex rotary embeddings use them.

Source: tools/autograd/derivatives.yaml and aten/src/ATen/ConjugateFallback.cpp of PyTorch 2.14.
"""

from __future__ import annotations

from memcalc.autograd.graph import Grads, Node, record
from memcalc.autograd.tensor import Tensor, elementwise_stride
from memcalc.ops.elementwise import broadcast_shapes, empty_like, to
from memcalc.tables.dtypes import COMPLEX64, COMPLEX128, FP32, FP64, promote


def view_as_complex(x: Tensor) -> Tensor:
    """x [..., 2] as complex numbers [...], a view."""
    stride = tuple(step // 2 for step in x.stride[:-1])
    out = Tensor(x.shape[:-1], stride, COMPLEX128 if x.dtype is FP64 else COMPLEX64, x.storage)
    record(x.tape, out, _view_as_complex_backward, (x,))
    return out


def _view_as_complex_backward(node: Node, grads: Grads) -> list[Tensor | None]:
    (grad,) = grads
    return [None if grad is None else view_as_real(grad)]


def view_as_real(x: Tensor) -> Tensor:
    """Complex x [...] as pairs [..., 2], a view."""
    real = FP64 if x.dtype is COMPLEX128 else FP32
    out = Tensor((*x.shape, 2), (*(step * 2 for step in x.stride), 1), real, x.storage)
    record(x.tape, out, _view_as_real_backward, (x,))
    return out


def _view_as_real_backward(node: Node, grads: Grads) -> list[Tensor | None]:
    (grad,) = grads
    return [None if grad is None else view_as_complex(grad)]


def polar(angle: Tensor) -> Tensor:
    """Complex numbers of length one; a tensor of ones lives while they are made."""
    ones = empty_like(angle)
    out = empty_like(angle, COMPLEX64)
    del ones
    return out


def mul_complex(x: Tensor, factor: Tensor) -> Tensor:
    """Complex x times `factor`, which needs no gradient: keeps the factor; backward makes its conjugate, a copy.

    A product with a factor of two fp64 is of that kind, and the gradient is cast back.
    """
    shape = broadcast_shapes(x.shape, factor.shape)
    out = x.tape.empty(
        shape,
        promote(x.dtype, factor.dtype),
        elementwise_stride(shape, ((x.shape, x.stride), (factor.shape, factor.stride))),
    )
    node = record(x.tape, out, _mul_complex_backward, (x,), (factor.shape, factor.dtype, x.dtype))
    if node is not None:
        node.save(factor)
    return out


def _mul_complex_backward(node: Node, grads: Grads) -> list[Tensor | None]:
    (grad,) = grads
    if grad is None:
        return [None]
    shape, dtype, narrow = node.context
    conjugate = node.tape.empty(shape, dtype)
    out = empty_like(grad)
    del conjugate
    return [to(out, narrow)]
