"""Operations that move no data: views, and the copies that hide in `reshape` and `contiguous`."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from memcalc.autograd.graph import Grads, Node, record
from memcalc.autograd.tensor import Tensor, broadcast_stride, dense_stride, is_contiguous, view_stride
from memcalc.common.sizes import Shape


def _alias(x: Tensor, shape: Shape, stride: Shape) -> Tensor:
    """Another tensor on the storage of `x`."""
    x.storage.allocation.aliased = True
    return Tensor(shape, stride, x.dtype, x.storage, is_view=True)


def _resolve(shape: Sequence[int], numel: int) -> Shape:
    """`shape` with its -1 filled in."""
    if -1 not in shape:
        return tuple(shape)
    known = prod(size for size in shape if size != -1)
    return tuple(numel // known if size == -1 else size for size in shape)


def view(x: Tensor, *shape: int) -> Tensor:
    """`x` seen as `shape`; its gradient is reshaped back, which copies if its layout demands it."""
    target = _resolve(shape, prod(x.shape))
    stride = view_stride(x.shape, x.stride, target)
    if stride is None:
        raise ValueError(f"view of {x.shape} with strides {x.stride} as {target} needs a copy")
    out = _alias(x, target, stride)
    record(x.tape, out, _view_backward, (x,), x.shape)
    return out


def _view_backward(node: Node, grads: Grads) -> list[Tensor | None]:
    (grad,) = grads
    return [None if grad is None else reshape(grad, *node.context)]


def reshape(x: Tensor, *shape: int) -> Tensor:
    """`view` where the strides allow it, a contiguous copy seen as `shape` where they do not."""
    target = _resolve(shape, prod(x.shape))
    if view_stride(x.shape, x.stride, target) is not None:
        return view(x, *target)
    return view(clone(x, contiguous=True), *target)


def clone(x: Tensor, *, contiguous: bool = False) -> Tensor:
    """A copy: row-major if `contiguous`, else in the layout of `x`."""
    out = x.tape.empty(x.shape, x.dtype, None if contiguous else dense_stride(x.shape, x.stride))
    record(x.tape, out, pass_through, (x,))
    return out


def pass_through(node: Node, grads: Grads) -> list[Tensor | None]:
    """The gradient itself goes to every input (copies, additions)."""
    return [grads[0]] * len(node.edges)


def repeat(x: Tensor, *counts: int) -> Tensor:
    """`x` so many times along each of its first dimensions, a copy; its gradient is summed over the repeats."""
    counts = (*counts, *(1,) * (len(x.shape) - len(counts)))
    out = x.tape.empty(tuple(count * size for count, size in zip(counts, x.shape, strict=True)), x.dtype)
    record(x.tape, out, _repeat_backward, (x,), x.shape)
    return out


def _repeat_backward(node: Node, grads: Grads) -> list[Tensor | None]:
    (grad,) = grads
    shape = node.context
    return [grad if grad is None or grad.shape == shape else node.tape.empty(shape, grad.dtype)]


def contiguous(x: Tensor) -> Tensor:
    """`x` itself if it is row-major already, else a copy."""
    return x if is_contiguous(x.shape, x.stride) else clone(x, contiguous=True)


def transpose(x: Tensor, dim0: int, dim1: int) -> Tensor:
    """`x` with two dimensions exchanged."""
    order = list(range(len(x.shape)))
    order[dim0], order[dim1] = order[dim1], order[dim0]
    return permute(x, *order)


def permute(x: Tensor, *order: int) -> Tensor:
    """`x` with its dimensions in another order."""
    order = tuple(dim % len(x.shape) for dim in order)
    out = _alias(x, tuple(x.shape[d] for d in order), tuple(x.stride[d] for d in order))
    record(x.tape, out, _permute_backward, (x,), order)
    return out


def _permute_backward(node: Node, grads: Grads) -> list[Tensor | None]:
    (grad,) = grads
    order = node.context
    return [None if grad is None else permute(grad, *sorted(range(len(order)), key=order.__getitem__))]


def unsqueeze(x: Tensor, dim: int) -> Tensor:
    """`x` with a dimension of size one at `dim`."""
    rank = len(x.shape) + 1
    dim %= rank
    step = x.shape[dim] * x.stride[dim] if dim < len(x.shape) else 1
    out = _alias(x, (*x.shape[:dim], 1, *x.shape[dim:]), (*x.stride[:dim], step, *x.stride[dim:]))
    record(x.tape, out, _view_backward, (x,), x.shape)
    return out


def squeeze(x: Tensor, dim: int) -> Tensor:
    """`x` without the dimension `dim` of size one."""
    dim %= len(x.shape)
    out = _alias(x, (*x.shape[:dim], *x.shape[dim + 1 :]), (*x.stride[:dim], *x.stride[dim + 1 :]))
    record(x.tape, out, _view_backward, (x,), x.shape)
    return out


def expand(x: Tensor, *shape: int) -> Tensor:
    """`x` repeated along dimensions of size one, without a copy; its gradient is summed over the repeats."""
    lead = len(shape) - len(x.shape)
    target = tuple(x.shape[dim - lead] if size == -1 else size for dim, size in enumerate(shape))
    out = _alias(x, target, broadcast_stride(x, target))
    record(x.tape, out, pass_through, (x,))
    return out


def narrow(x: Tensor, dim: int, length: int) -> Tensor:
    """`length` elements of `x` along `dim`; the gradient is a zero-filled tensor of the full size."""
    dim %= len(x.shape)
    if length == x.shape[dim]:
        out = _alias(x, x.shape, x.stride)
        record(x.tape, out, narrow_backward, (x,), x.shape)
        return out
    out = _alias(x, (*x.shape[:dim], length, *x.shape[dim + 1 :]), x.stride)
    record(x.tape, out, narrow_backward, (x,), x.shape)
    return out


def narrow_backward(node: Node, grads: Grads) -> list[Tensor | None]:
    """A zero-filled tensor of the size of what was cut."""
    (grad,) = grads
    return [None if grad is None else node.tape.empty(node.context, grad.dtype)]


def slice(x: Tensor, dim: int, step: int) -> Tensor:
    """Every `step`-th element of `x` along `dim`."""
    dim %= len(x.shape)
    length = -(-x.shape[dim] // step)
    stride = (*x.stride[:dim], x.stride[dim] * step, *x.stride[dim + 1 :])
    out = _alias(x, (*x.shape[:dim], length, *x.shape[dim + 1 :]), stride)
    record(x.tape, out, narrow_backward, (x,), x.shape)
    return out


def select(x: Tensor, dim: int) -> Tensor:
    """One element of `x` along `dim`, the dimension gone."""
    dim %= len(x.shape)
    out = _alias(x, (*x.shape[:dim], *x.shape[dim + 1 :]), (*x.stride[:dim], *x.stride[dim + 1 :]))
    record(x.tape, out, narrow_backward, (x,), x.shape)
    return out


def index(x: Tensor, *indices: Tensor) -> Tensor:
    """Elements of `x` at index tensors [n] over its first dimensions, a copy: keeps the indices."""
    shape = (*indices[0].shape, *x.shape[len(indices) :])
    out = x.tape.empty(shape, x.dtype)
    node = record(x.tape, out, narrow_backward, (x,), x.shape)
    if node is not None:
        for index in indices:
            node.save(index)
    return out
