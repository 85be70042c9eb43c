"""Operations along a sequence: padding, cumulative sums, convolutions of one dimension.

Source: tools/autograd/derivatives.yaml and torch/csrc/autograd/FunctionsManual.cpp of PyTorch 2.14.
"""

from __future__ import annotations

from memcalc.model.autograd import Grads, Node, record
from memcalc.model.ops.elementwise import fp32_under_autocast, like
from memcalc.model.ops.matmul import lower
from memcalc.model.tensor import Tensor
from memcalc.tables.dtypes import BOOL


def pad(x: Tensor, dim: int, extra: int) -> Tensor:
    """x with `extra` zeros before or behind it along `dim`, a copy even where there is nothing to add; so is its gradient."""
    dim %= len(x.shape)
    out = x.tape.new((*x.shape[:dim], x.shape[dim] + extra, *x.shape[dim + 1 :]), x.dtype)
    record(x.tape, out, _pad_backward, (x,), x.shape)
    return out


def _pad_backward(node: Node, grads: Grads) -> list[Tensor | None]:
    (grad,) = grads
    return [None if grad is None else node.tape.new(node.context, grad.dtype)]


def cumsum(x: Tensor, dim: int = -1) -> Tensor:
    """Cumulative sum along `dim`; its gradient is flipped, summed up and flipped again. Runs in fp32 under autocast."""
    x = fp32_under_autocast(x)
    out = x.tape.new(x.shape, x.dtype)
    record(x.tape, out, _cumsum_backward, (x,), x.shape[dim])
    return out


def _cumsum_backward(node: Node, grads: Grads) -> list[Tensor | None]:
    (grad,) = grads
    if grad is None or node.context == 1:
        return [grad]
    flipped = like(grad)
    summed = like(flipped)
    out = like(summed)
    del flipped, summed
    return [out]


def triangle(tensor: Tensor, size: int) -> Tensor:
    """A boolean lower triangle [size, size]; `tensor` lends the tape."""
    ones = tensor.tape.new((size, size), BOOL)
    return like(ones)


def conv1d(x: Tensor, weight: Tensor, bias: Tensor | None, padding: int) -> Tensor:
    """Convolution of x [b, c, s] with weight [out, c / groups, width] and step one: [b, out, s + 2·padding - width + 1].

    Keeps x and weight; backward makes the gradients of x, weight and bias at once.
    """
    if x.tape.autocast is not None:
        bias = None if bias is None else lower(bias)
        weight = lower(weight)
        x = lower(x)
    batch, _, length = x.shape
    out = x.tape.new((batch, weight.shape[0], length + 2 * padding - weight.shape[2] + 1), x.dtype)
    node = record(x.tape, out, _conv1d_backward, (x, weight, bias))
    if node is not None:
        if node.edges[1] is not None:
            node.save(x.storage)
        if node.edges[0] is not None:
            node.save(weight.storage)
    return out


def _conv1d_backward(node: Node, grads: Grads) -> list[Tensor | None]:
    (grad,) = grads
    if grad is None:
        return [None, None, None]
    return [None if edge is None else node.tape.new(edge[2], grad.dtype) for edge in node.edges]
