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


def empty_like_both(a: Tensor, b: Tensor, dtype: DType) -> Tensor:
    """The result of an element-wise operation on two tensors, in the layout that TensorIterator gives it."""
    shape = a.shape if a.shape == b.shape else broadcast_shapes(a.shape, b.shape)
    return a.tape.empty(shape, dtype, elementwise_stride(shape, ((a.shape, a.stride), (b.shape, b.stride))))


def empty_like(x: Tensor, dtype: DType | None = None) -> Tensor:
    """A new tensor of the shape and layout of `x`."""
    return x.tape.empty(x.shape, dtype or x.dtype, dense_stride(x.shape, x.stride))


def new_gradient(node: Node, grads: Grads) -> list[Tensor | None]:
    """One new tensor of the size of the incoming gradient."""
    (grad,) = grads
    return [None if grad is None else empty_like(grad)]


def add(a: Tensor, b: Tensor) -> Tensor:
    """a + b: the same gradient goes to both sides."""
    out = empty_like_both(a, b, result_type(a, b))
    record(a.tape, out, pass_through, (a, b))
    return out


def sub(a: Tensor, b: Tensor) -> Tensor:
    """a - b: the gradient goes to a, its negative to b."""
    out = empty_like_both(a, b, result_type(a, b))
    record(a.tape, out, _sub_backward, (a, b))
    return out


def _sub_backward(node: Node, grads: Grads) -> list[Tensor | None]:
    (grad,) = grads
    negative = None if grad is None or not node.needs(1) else empty_like(grad)
    return [grad, negative]


def add_(a: Tensor, b: Tensor) -> Tensor:
    """a += b, in place."""
    out = Tensor(a.shape, a.stride, a.dtype, a.storage, a.node, a.slot)
    record(a.tape, out, pass_through, (a, b))
    return out


def mul(a: Tensor, b: Tensor) -> Tensor:
    """a * b: keeps each factor that the other's gradient needs; backward computes b's gradient first."""
    out = empty_like_both(a, b, result_type(a, b))
    node = record(a.tape, out, _mul_backward, (a, b))
    if node is not None:
        if node.edges[0] is not None:
            node.save(b)
        if node.edges[1] is not None:
            node.save(a)
    return out


def _mul_backward(node: Node, grads: Grads) -> list[Tensor | None]:
    (grad,) = grads
    if grad is None:
        return [None, None]
    second = empty_like(grad) if node.needs(1) else None
    first = empty_like(grad) if node.needs(0) else None
    return [first, second]


def div(a: Tensor, b: Tensor) -> Tensor:
    """a / b: keeps b, and a if b needs a gradient."""
    out = empty_like_both(a, b, result_type(a, b))
    node = record(a.tape, out, div_backward, (a, b))
    if node is not None:
        if node.edges[1] is not None:
            node.save(a)
        node.save(b)
    return out


def div_backward(node: Node, grads: Grads) -> list[Tensor | None]:
    """The backward of a quotient: b's gradient first, -grad * ((a / b) / b), whose temporaries all live to its end."""
    (grad,) = grads
    if grad is None:
        return [None, None]
    second = None
    if node.needs(1):
        temporaries = [empty_like(grad) for _ in range(3)]
        second = empty_like(grad)
        temporaries.clear()
    first = empty_like(grad) if node.needs(0) else None
    return [first, second]


def mul_scalar(x: Tensor) -> Tensor:
    """x times or divided by a number."""
    out = empty_like(x)
    record(x.tape, out, new_gradient, (x,))
    return out


neg = mul_scalar


def add_scalar(x: Tensor) -> Tensor:
    """x plus a number."""
    out = empty_like(x)
    record(x.tape, out, pass_through, (x,))
    return out


def pow(x: Tensor, exponent: float = 2) -> Tensor:
    """x ** exponent: keeps x. Runs in fp32 under autocast."""
    x = fp32_under_autocast(x)
    out = empty_like(x)
    node = record(x.tape, out, _pow_backward, (x,), exponent)
    if node is not None:
        node.save(x)
    return out


def _pow_backward(node: Node, grads: Grads) -> list[Tensor | None]:
    (grad,) = grads
    if grad is None:
        return [None]
    powered = empty_like(grad)
    scaled = empty_like(grad)
    out = empty_like(grad)
    del powered, scaled
    return [out]


def to(x: Tensor, dtype: DType, *, contiguous: bool = False) -> Tensor:
    """x in another dtype, in its own layout or row-major; itself if it has it already."""
    if x.dtype is dtype:
        return x
    out = x.tape.empty(x.shape, dtype) if contiguous else empty_like(x, dtype)
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
    if p == 0.0 or not tape.dropout_enabled:
        return x
    mask = empty_like(x, BOOL)
    out = empty_like(x)
    node = record(tape, out, new_gradient, (x,))
    if node is not None:
        node.save(mask, output=True)
    return out


def masked_fill(x: Tensor, mask: Tensor) -> Tensor:
    """x with a number where `mask` says so, contiguous: keeps the mask."""
    out = x.tape.empty(broadcast_shapes(x.shape, mask.shape), x.dtype)
    node = record(x.tape, out, new_gradient, (x,))
    if node is not None:
        node.save(mask)
    return out


def masked_fill_(x: Tensor, mask: Tensor) -> Tensor:
    """x with a number where `mask` says so, in place: keeps the mask."""
    out = Tensor(x.shape, x.stride, x.dtype, x.storage, x.node, x.slot)
    node = record(x.tape, out, new_gradient, (x,))
    if node is not None:
        node.save(mask)
    return out


def where(mask: Tensor, a: Tensor, b: Tensor | None = None) -> Tensor:
    """torch.where(mask, a, b): saves the mask. `b` None is a number, which is a 0-dim tensor for a moment."""
    if b is None:
        fill = a.tape.empty((), a.dtype)
        out = empty_like_both(a, mask, a.dtype)
        del fill
    else:
        both = broadcast_shapes(a.shape, b.shape)
        shape = broadcast_shapes(both, mask.shape)
        operands = (a, b) if shape == both else (a, b, mask)
        out = a.tape.empty(shape, a.dtype, elementwise_stride(shape, tuple((x.shape, x.stride) for x in operands)))
    node = record(a.tape, out, _where_backward, (a,) if b is None else (a, b))
    if node is not None:
        node.save(mask)
    return out


def _where_backward(node: Node, grads: Grads) -> list[Tensor | None]:
    """A zero for each side that needs a gradient, and the gradient."""
    (grad,) = grads
    out: list[Tensor | None] = [None] * len(node.edges)
    if grad is None:
        return out
    for index in range(len(out)):
        if node.needs(index):
            zero = node.tape.empty((), grad.dtype)
            out[index] = empty_like(grad)
            del zero
    return out


def compare(a: Tensor, b: Tensor | None = None) -> Tensor:
    """A boolean tensor from a comparison."""
    return empty_like(a, BOOL) if b is None else empty_like_both(a.detach(), b.detach(), BOOL)
