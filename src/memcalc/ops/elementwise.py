"""Element-wise operations: what each keeps for backward and what its backward allocates.

The names are those of `torch`. Where an operation keeps nothing, its gradient needs only the incoming one.
Source of the saved tensors: tools/autograd/derivatives.yaml of PyTorch 2.14.
"""

from __future__ import annotations

from functools import lru_cache

from memcalc.autograd.graph import Grads, Node, record
from memcalc.autograd.tensor import Tensor, dense_stride, elementwise_stride
from memcalc.common.sizes import Shape
from memcalc.ops.views import pass_through
from memcalc.tables.dtypes import BOOL, FP32, DType, promote


@lru_cache(maxsize=4096)
def broadcast_shapes(a: Shape, b: Shape) -> Shape:
    """The shape of an element-wise operation on shapes `a` and `b`."""
    if len(a) < len(b):
        a, b = b, a
    lead = len(a) - len(b)
    return a[:lead] + tuple(y if x == 1 else x for x, y in zip(a[lead:], b, strict=True))


def result_type(a: Tensor, b: Tensor) -> DType:
    """The dtype of an operation on two tensors: one without dimensions does not widen one with some."""
    if a.dtype.floating == b.dtype.floating and bool(a.shape) != bool(b.shape):
        return (a if a.shape else b).dtype
    return promote(a.dtype, b.dtype)


def _empty(a: Tensor, b: Tensor, dtype: DType) -> Tensor:
    """The result of an element-wise operation on two tensors, in the layout that TensorIterator gives it."""
    shape = a.shape if a.shape == b.shape else broadcast_shapes(a.shape, b.shape)
    return a.tape.empty(shape, dtype, elementwise_stride(shape, ((a.shape, a.stride), (b.shape, b.stride))))


def like(x: Tensor, dtype: DType | None = None) -> Tensor:
    """A new tensor of the shape and layout of `x`."""
    return x.tape.empty(x.shape, dtype or x.dtype, dense_stride(x.shape, x.stride))


def as_it_comes(node: Node, grads: Grads) -> list[Tensor | None]:
    """One new tensor of the size of the incoming gradient."""
    (grad,) = grads
    return [None if grad is None else like(grad)]


def add(a: Tensor, b: Tensor) -> Tensor:
    """a + b: the same gradient goes to both sides."""
    out = _empty(a, b, result_type(a, b))
    record(a.tape, out, pass_through, (a, b))
    return out


def subtract(a: Tensor, b: Tensor) -> Tensor:
    """a - b: the gradient goes to a, its negative to b."""
    out = _empty(a, b, result_type(a, b))
    record(a.tape, out, _subtract_backward, (a, b))
    return out


def _subtract_backward(node: Node, grads: Grads) -> list[Tensor | None]:
    (grad,) = grads
    negative = None if grad is None or not node.needs(1) else like(grad)
    return [grad, negative]


def add_(a: Tensor, b: Tensor) -> Tensor:
    """a += b, in place."""
    out = Tensor(a.shape, a.stride, a.dtype, a.storage, a.node, a.slot)
    record(a.tape, out, pass_through, (a, b))
    return out


def multiply(a: Tensor, b: Tensor) -> Tensor:
    """a * b: keeps each factor that the other's gradient needs; backward computes b's gradient first."""
    out = _empty(a, b, result_type(a, b))
    node = record(a.tape, out, _product_backward, (a, b))
    if node is not None:
        if node.edges[0] is not None:
            node.save(b)
        if node.edges[1] is not None:
            node.save(a)
    return out


def _product_backward(node: Node, grads: Grads) -> list[Tensor | None]:
    (grad,) = grads
    if grad is None:
        return [None, None]
    second = like(grad) if node.needs(1) else None
    first = like(grad) if node.needs(0) else None
    return [first, second]


def divide(a: Tensor, b: Tensor) -> Tensor:
    """a / b: keeps b, and a if b needs a gradient."""
    out = _empty(a, b, result_type(a, b))
    node = record(a.tape, out, divide_gradients, (a, b))
    if node is not None:
        if node.edges[1] is not None:
            node.save(a)
        node.save(b)
    return out


def divide_gradients(node: Node, grads: Grads) -> list[Tensor | None]:
    """The backward of a quotient: b's gradient first, -grad * ((a / b) / b), whose temporaries all live to its end."""
    (grad,) = grads
    if grad is None:
        return [None, None]
    second = None
    if node.needs(1):
        temporaries = [like(grad) for _ in range(3)]
        second = like(grad)
        temporaries.clear()
    first = like(grad) if node.needs(0) else None
    return [first, second]


def scale(x: Tensor) -> Tensor:
    """x times or divided by a number."""
    out = like(x)
    record(x.tape, out, as_it_comes, (x,))
    return out


negative = scale


def shift(x: Tensor) -> Tensor:
    """x plus a number."""
    out = like(x)
    record(x.tape, out, pass_through, (x,))
    return out


def power(x: Tensor, exponent: float = 2) -> Tensor:
    """x ** exponent: keeps x. Runs in fp32 under autocast."""
    x = fp32_under_autocast(x)
    out = like(x)
    node = record(x.tape, out, _power_backward, (x,), exponent)
    if node is not None:
        node.save(x)
    return out


def _power_backward(node: Node, grads: Grads) -> list[Tensor | None]:
    (grad,) = grads
    if grad is None:
        return [None]
    powered = like(grad)
    scaled = like(grad)
    out = like(grad)
    del powered, scaled
    return [out]


def to(x: Tensor, dtype: DType, *, contiguous: bool = False) -> Tensor:
    """x in another dtype, in its own layout or row-major; itself if it has it already."""
    if x.dtype is dtype:
        return x
    out = x.tape.empty(x.shape, dtype) if contiguous else like(x, dtype)
    record(x.tape, out, _to_backward, (x,), x.dtype)
    return out


def _to_backward(node: Node, grads: Grads) -> list[Tensor | None]:
    (grad,) = grads
    return [None if grad is None else to(grad, node.context)]


def fp32_under_autocast(x: Tensor) -> Tensor:
    """The autocast policy of operations that run in fp32."""
    return x if x.tape.autocast is None or x.dtype is FP32 or not x.dtype.floating else to(x, FP32)


def dropout(x: Tensor, p: float) -> Tensor:
    """Dropout keeps a mask of one byte per element; with p = 0 or outside training it is no operation."""
    tape = x.tape
    if p == 0.0 or not tape.applies_dropout:
        return x
    out = like(x)
    mask = like(x, BOOL)
    node = record(tape, out, as_it_comes, (x,))
    if node is not None:
        node.save(mask)
    return out


def masked_fill(x: Tensor, mask: Tensor) -> Tensor:
    """x with a number where `mask` says so, contiguous: keeps the mask."""
    out = x.tape.empty(broadcast_shapes(x.shape, mask.shape), x.dtype)
    node = record(x.tape, out, as_it_comes, (x,))
    if node is not None:
        node.save(mask)
    return out


def masked_fill_(x: Tensor, mask: Tensor) -> Tensor:
    """x with a number where `mask` says so, in place: keeps the mask."""
    out = Tensor(x.shape, x.stride, x.dtype, x.storage, x.node, x.slot)
    node = record(x.tape, out, as_it_comes, (x,))
    if node is not None:
        node.save(mask)
    return out


def where(mask: Tensor, a: Tensor) -> Tensor:
    """a where `mask` holds, else a number, which is a tensor for a moment: keeps the mask."""
    fill = a.tape.empty((), a.dtype)
    out = _empty(a, mask, a.dtype)
    del fill
    node = record(a.tape, out, _where_backward, (a,))
    if node is not None:
        node.save(mask)
    return out


def _where_backward(node: Node, grads: Grads) -> list[Tensor | None]:
    (grad,) = grads
    if grad is None:
        return [None]
    fill = node.tape.empty((), grad.dtype)
    out = like(grad)
    del fill
    return [out]


def minimum(a: Tensor, b: Tensor) -> Tensor:
    """The smaller of two tensors that need no gradient."""
    return _empty(a.detach(), b.detach(), result_type(a, b))


def compare(a: Tensor, b: Tensor | None = None) -> Tensor:
    """A boolean tensor from a comparison."""
    return like(a, BOOL) if b is None else _empty(a.detach(), b.detach(), BOOL)
