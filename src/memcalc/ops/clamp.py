"""Element-wise operations whose gradient depends on where the input lies.

Source: tools/autograd/derivatives.yaml and torch/csrc/autograd/FunctionsManual.cpp of PyTorch 2.14.
"""

from __future__ import annotations

from memcalc.autograd.graph import Grads, Node, record
from memcalc.autograd.tensor import Tensor
from memcalc.ops.elementwise import compare, empty_like, empty_like_both, fp32_under_autocast, result_type
from memcalc.ops.unary import backward_temporaries
from memcalc.ops.views import clone
from memcalc.tables.dtypes import BOOL, FP32


def clamp(x: Tensor, bounds: int = 2) -> Tensor:
    """x kept within one bound or two: keeps x; backward makes a zero, a mask for each bound, and the gradient."""
    out = empty_like(x)
    node = record(x.tape, out, _clamp_backward, (x,), bounds)
    if node is not None:
        node.save(x)
    return out


def clamp_tensor(x: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """x kept between two tensors of its shape: keeps all three."""
    out = empty_like(x, result_type(x, low))
    node = record(x.tape, out, _clamp_tensor_backward, (x,))
    if node is not None:
        for tensor in (x, low, high):
            node.save(tensor)
    return out


def _clamp_tensor_backward(node: Node, grads: Grads) -> list[Tensor | None]:
    """Where it is between the bounds the gradient passes; where it equals one, half of it does."""
    (grad,) = grads
    if grad is None:
        return [None]
    crossed = empty_like(grad, BOOL)
    equal = [empty_like(grad, BOOL) for _ in range(3)]
    at_bound = empty_like(grad, BOOL)
    equal.clear()
    beyond = [empty_like(grad, BOOL) for _ in range(2)]
    outside = empty_like(grad, BOOL)
    beyond.clear()
    half, split = empty_like(grad), empty_like(grad)
    out = empty_like(grad) if node.tape.sum_out_of_place else split
    del crossed, at_bound, outside, half
    return [out]


def clamp_(x: Tensor, *, of_view: bool = False) -> Tensor:
    """x kept within two bounds, in place: keeps a copy of x as it was.

    Where x is a view (`of_view`: what a linear layer with a bias returns), backward copies the gradient of the whole
    first, and then the part of it that it changes.
    """
    before = clone(x.detach()) if x.tape.grad_enabled and x.requires_grad else None
    out = Tensor(x.shape, x.stride, x.dtype, x.storage, x.node, x.slot)
    node = record(x.tape, out, _clamp_view_backward if of_view else _clamp_backward, (x,), 2)
    if node is not None and before is not None:
        node.save(before)
    return out


def _clamp_view_backward(node: Node, grads: Grads) -> list[Tensor | None]:
    (grad,) = grads
    if grad is None:
        return [None]
    whole = empty_like(grad)
    part = empty_like(grad)
    changed = _clamp_backward(node, [part])
    del part, changed
    return [whole]


def _clamp_backward(node: Node, grads: Grads) -> list[Tensor | None]:
    (grad,) = grads
    if grad is None:
        return [None]
    zero = node.tape.empty((), grad.dtype)
    inside = [empty_like(grad, BOOL) for _ in range(node.context)]
    out = empty_like(grad)
    inside.clear()
    del zero
    return [out]


def minimum(a: Tensor, b: Tensor) -> Tensor:
    """torch.minimum and torch.maximum: save both; where they are equal, each gets half of the gradient."""
    out = empty_like_both(a, b, result_type(a, b))
    node = record(a.tape, out, _minimum_backward, (a, b))
    if node is not None:
        node.save(a)
        node.save(b)
    return out


maximum = minimum


def _minimum_backward(node: Node, grads: Grads) -> list[Tensor | None]:
    (grad,) = grads
    out: list[Tensor | None] = [None, None]
    if grad is None:
        return out
    for index in (1, 0):
        if node.needs(index):
            above, half, equal = empty_like(grad, BOOL), empty_like(grad), empty_like(grad, BOOL)
            split = empty_like(grad)
            # masked in place, unless PyTorch's trackers look on
            out[index] = empty_like(grad) if node.tape.sum_out_of_place else split
            del above, half, equal, split
    return out


def log_sigmoid(x: Tensor) -> Tensor:
    """log(sigmoid(x)) keeps x; its second output is empty on a GPU."""
    out = empty_like(x)
    node = record(x.tape, out, backward_temporaries(1), (x,))
    if node is not None:
        node.save(x)
    return out


def expm1(x: Tensor) -> Tensor:
    """exp(x) - 1 keeps its output; backward makes output + 1, then the product. Runs in fp32 under autocast."""
    x = fp32_under_autocast(x)
    out = empty_like(x)
    node = record(x.tape, out, backward_temporaries(2), (x,))
    if node is not None:
        node.save(out)
    return out


def finite_bound(x: Tensor) -> Tensor:
    """The bound that x is clamped within, a scalar that depends on whether x is infinite anywhere (T5 in fp16)."""
    tape = x.tape
    infinite = compare(empty_like(x))
    some = tape.empty((), BOOL)
    del infinite
    bound = tape.empty((), FP32)
    del some
    return bound


def clamp_within(x: Tensor, bound: Tensor) -> Tensor:
    """x between a `bound` and its negative: keeps x and both."""
    tape = x.tape
    low = empty_like(bound)
    out = empty_like(x)
    node = record(tape, out, _clamp_backward, (x,), 2)
    if node is not None:
        for tensor in (x, low, bound):
            node.save(tensor)
    return out


def check_finite(x: Tensor) -> Tensor:
    """x itself, after the masks that it takes to look for infinities in it."""
    equal, finite = compare(x), compare(empty_like(x))
    empty_like(equal)
    del equal, finite
    return x
