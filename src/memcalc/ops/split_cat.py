"""Tensors cut in pieces and put together: pieces are views, what is put together is new."""

from __future__ import annotations

from collections.abc import Sequence

from memcalc.autograd.graph import Grads, Node, record
from memcalc.autograd.tensor import Tensor, contiguous_stride, is_contiguous
from memcalc.common.sizes import Shape
from memcalc.ops.views import _alias
from memcalc.tables.dtypes import promote


def split(x: Tensor, sizes: Sequence[int], dim: int) -> list[Tensor]:
    """`x` in pieces of `sizes` along `dim`: one node, whose gradient is concatenated from those of the pieces."""
    dim %= len(x.shape)
    pieces = [_alias(x, (*x.shape[:dim], size, *x.shape[dim + 1 :]), x.stride) for size in sizes]
    node = record(x.tape, pieces[0], _split_backward, (x,), (dim, tuple(piece.shape for piece in pieces)))
    for slot, piece in enumerate(pieces):
        piece.node, piece.slot = node, slot
    return pieces


def chunk(x: Tensor, count: int, dim: int) -> list[Tensor]:
    """`x` in `count` equal pieces along `dim`."""
    return split(x, [x.shape[dim] // count] * count, dim)


def _split_backward(node: Node, grads: Grads) -> list[Tensor | None]:
    dim, shapes = node.context
    present = [grad for grad in grads if grad is not None]
    pieces: list[Tensor] = []
    for index, shape in enumerate(shapes):
        grad = grads[index] if index < len(grads) else None
        pieces.append(node.tape.empty(shape, present[0].dtype) if grad is None else grad)
    return [cat(pieces, dim)]


def unbind(x: Tensor, dim: int) -> list[Tensor]:
    """The elements of `x` along `dim`: one node, whose gradient is stacked from those of the elements."""
    dim %= len(x.shape)
    shape, stride = (*x.shape[:dim], *x.shape[dim + 1 :]), (*x.stride[:dim], *x.stride[dim + 1 :])
    pieces = [_alias(x, shape, stride) for _ in range(x.shape[dim])]
    node = record(x.tape, pieces[0], _unbind_backward, (x,), (len(pieces), x.shape))
    for slot, piece in enumerate(pieces):
        piece.node, piece.slot = node, slot
    return pieces


def _unbind_backward(node: Node, grads: Grads) -> list[Tensor | None]:
    present = [grad for grad in grads if grad is not None]
    zero = None
    if len(present) < node.context[0]:
        zero = node.tape.empty((), present[0].dtype)  # one zero stands for all that did not come
    out = node.tape.empty(node.context[1], present[0].dtype)
    del zero
    return [out]


def cat(pieces: Sequence[Tensor], dim: int) -> Tensor:
    """The pieces one after another along `dim`; their gradients are views of its gradient.

    The result is contiguous, or has the channels of images [b, c, height, width] innermost if all pieces do.
    """
    tape, first = pieces[0].tape, pieces[0]
    dim %= len(first.shape)
    total = sum(piece.shape[dim] for piece in pieces)
    shape = (*first.shape[:dim], total, *first.shape[dim + 1 :])
    dtype = first.dtype
    for piece in pieces:
        dtype = promote(dtype, piece.dtype)
    out = tape.empty(
        shape, dtype, memory_format_like(shape, [(x.shape, x.stride) for x in pieces]) if len(shape) == 4 else None
    )
    record(tape, out, _cat_backward, pieces, (dim, tuple(piece.shape for piece in pieces)))
    return out


def memory_format_like(shape: Shape, layouts: Sequence[tuple[Shape, Shape]]) -> Shape:
    """Strides of `shape` [b, c, *sizes]: contiguous unless in all `layouts` (shape, stride) channels lie innermost."""
    order = (0, *range(2, len(shape)), 1)
    for sizes, strides in layouts:
        if not _channels_last(sizes, strides):
            return contiguous_stride(shape)
    first, *steps, last = contiguous_stride(tuple(shape[dim] for dim in order))
    return (first, last, *steps)


def _channels_last(sizes: Shape, strides: Shape) -> bool:
    """Whether a tensor suggests that format, which takes the stride of a batch of one at its word.

    Source: c10/core/MemoryFormat.h, `is_channels_last_strides_2d_s4` and its sibling of five dimensions.
    """
    if len(sizes) == 3:  # as an image of one row
        inside = (sizes[0], sizes[2], sizes[1]), (strides[0], strides[2], strides[1])
        return is_contiguous(*inside) and not is_contiguous(sizes, strides)
    if strides[1] == 0:
        return False
    least = 0
    for dim in (1, *range(len(sizes) - 1, 1, -1), 0):
        if sizes[dim] == 0 or strides[dim] < least or (dim == 0 and least == strides[1]):
            return False
        least = strides[dim] * max(sizes[dim], 1)
    return True


def _cat_backward(node: Node, grads: Grads) -> list[Tensor | None]:
    (grad,) = grads
    _, shapes = node.context
    return [None if grad is None else _alias(grad, shape, grad.stride) for shape in shapes]


def stack(pieces: Sequence[Tensor], dim: int) -> Tensor:
    """The pieces as elements along a new dimension `dim`."""
    first = pieces[0]
    dim %= len(first.shape) + 1
    shape = (*first.shape[:dim], len(pieces), *first.shape[dim:])
    out = first.tape.empty(shape, first.dtype)
    record(first.tape, out, _stack_backward, pieces, dim)
    return out


def _stack_backward(node: Node, grads: Grads) -> list[Tensor | None]:
    (grad,) = grads
    if grad is None:
        return [None] * len(node.edges)
    dim = node.context
    shape, stride = (*grad.shape[:dim], *grad.shape[dim + 1 :]), (*grad.stride[:dim], *grad.stride[dim + 1 :])
    return [_alias(grad, shape, stride) for _ in node.edges]
