"""Operations along a sequence: padding, cumulative sums, convolutions of one dimension.

Source: tools/autograd/derivatives.yaml and torch/csrc/autograd/FunctionsManual.cpp of PyTorch 2.14.
"""

from __future__ import annotations

from memcalc.autograd.graph import Grads, Node, record
from memcalc.autograd.tensor import Tensor, dense_stride
from memcalc.common.sizes import Shape
from memcalc.ops.elementwise import empty_like, fp32_under_autocast
from memcalc.ops.split_cat import memory_format_like
from memcalc.tables.dtypes import BOOL


def pad(x: Tensor, dim: int, extra: int, *more: tuple[int, int]) -> Tensor:
    """x with `extra` zeros before or after it along `dim`: laid out as x if there are none.

    Otherwise it is contiguous, or has its second dimension innermost where x has. `more` are other dimensions, each
    with its zeros. Its gradient is a copy too.
    """
    added = {place % len(x.shape): zeros for place, zeros in ((dim, extra), *more)}
    shape = tuple(size + added.get(place, 0) for place, size in enumerate(x.shape))
    stride = _suggested_stride(x, shape) if any(added.values()) else dense_stride(x.shape, x.stride)
    out = x.tape.empty(shape, x.dtype, stride)
    record(x.tape, out, _pad_backward, (x,), x.shape)
    return out


def _pad_backward(node: Node, grads: Grads) -> list[Tensor | None]:
    (grad,) = grads
    return [
        None if grad is None else node.tape.empty(node.context, grad.dtype, dense_stride(node.context, grad.stride))
    ]


def _suggested_stride(x: Tensor, shape: Shape) -> Shape | None:
    """Strides of a new tensor in the memory format that x suggests: channels last, or None for row by row."""
    return memory_format_like(shape, [(x.shape, x.stride)]) if len(x.shape) in (4, 5) else None


def roll(x: Tensor) -> Tensor:
    """x rolled around along two dimensions, one after the other inside the operation; so is its gradient."""
    if not x.tape.sum_out_of_place:
        once = empty_like(x)
    out = x.tape.empty(x.shape, x.dtype)
    if not x.tape.sum_out_of_place:
        del once
    record(x.tape, out, _roll_backward, (x,))
    return out


def _roll_backward(node: Node, grads: Grads) -> list[Tensor | None]:
    (grad,) = grads
    return [None if grad is None else roll(grad)]


def cumsum(x: Tensor, dim: int = -1) -> Tensor:
    """Cumulative sum along `dim`; its gradient is flipped, summed up and flipped again. Runs in fp32 under autocast."""
    x = fp32_under_autocast(x)
    out = x.tape.empty(x.shape, x.dtype)
    record(x.tape, out, _cumsum_backward, (x,), x.shape[dim])
    return out


def _cumsum_backward(node: Node, grads: Grads) -> list[Tensor | None]:
    (grad,) = grads
    if grad is None or node.context == 1:
        return [grad]
    flipped = empty_like(grad)
    summed = empty_like(flipped)
    out = empty_like(summed)
    del flipped, summed
    return [out]


def tril(tensor: Tensor, size: int) -> Tensor:
    """A boolean lower triangle [size, size]; `tensor` gives the tape."""
    ones = tensor.tape.empty((size, size), BOOL)
    return empty_like(ones)
