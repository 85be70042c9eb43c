"""Convolution: a matrix multiplication in disguise. Keeps its input and its weight."""

from __future__ import annotations

from memcalc.model.autograd import Grads, Node, record
from memcalc.model.ops.elementwise import fp32_under_autocast
from memcalc.model.ops.matmul import lower
from memcalc.model.tensor import Tensor


def convolution(x: Tensor, weight: Tensor, bias: Tensor | None, *, stride: int = 1, padding: int = 0) -> Tensor:
    """Convolution of x [b, c, *sizes] with weight [out, c / groups, *widths]: [b, out, *sizes'].

    Keeps x and weight; backward makes the gradients of x, weight and bias at once. A patch embedding strides as far as
    it is wide.
    """
    if x.tape.autocast is not None:
        bias = None if bias is None else lower(bias)
        weight = lower(weight)
        x = lower(x)
    sizes = zip(x.shape[2:], weight.shape[2:], strict=True)
    spatial = tuple((size + 2 * padding - width) // stride + 1 for size, width in sizes)
    out = x.tape.new((x.shape[0], weight.shape[0], *spatial), x.dtype)
    node = record(x.tape, out, _convolution_backward, (x, weight, bias))
    if node is not None:
        node.save(x)
        node.save(weight)
    return out


def _convolution_backward(node: Node, grads: Grads) -> list[Tensor | None]:
    (grad,) = grads
    if grad is None:
        return [None, None, None]
    return [None if edge is None else node.tape.new(edge[2], grad.dtype) for edge in node.edges]


def average_pool(x: Tensor, kernel: int) -> Tensor:
    """The mean of squares of `kernel` by `kernel` of x [b, c, height, width]: keeps x."""
    out = x.tape.new((*x.shape[:2], x.shape[2] // kernel, x.shape[3] // kernel), x.dtype)
    node = record(x.tape, out, _full_backward, (x,), x.shape)
    if node is not None:
        node.save(x)
    return out


def _full_backward(node: Node, grads: Grads) -> list[Tensor | None]:
    (grad,) = grads
    return [None if grad is None else node.tape.new(node.context, grad.dtype)]


def unfold(x: Tensor, side: int) -> Tensor:
    """Squares of `side` by `side` of x [b, c, height, width] as columns, a copy: [b, c · side², squares]."""
    batch, channels, height, width = x.shape
    out = x.tape.new((batch, channels * side**2, (height // side) * (width // side)), x.dtype)
    record(x.tape, out, _full_backward, (x,), x.shape)
    return out


def interpolate(x: Tensor, sizes: tuple[int, int]) -> Tensor:
    """x [b, c, height, width] resampled to these sizes, in fp32 under autocast: keeps nothing."""
    x = fp32_under_autocast(x)
    out = x.tape.new((*x.shape[:2], *sizes), x.dtype)
    record(x.tape, out, _full_backward, (x,), x.shape)
    return out


def conv1d(x: Tensor, weight: Tensor, bias: Tensor | None, padding: int) -> Tensor:
    """Convolution of x [b, c, s] with weight [out, c / groups, width] and step one: [b, out, s + 2·padding - w + 1]."""
    return convolution(x, weight, bias, padding=padding)
