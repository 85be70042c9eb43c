"""Tensors without values: shape, strides, dtype and a storage that lives exactly as long as something refers to it.

Liveness is CPython's own reference counting, as it is in PyTorch: a storage dies when its last reference goes, be it
a local of a running forward, a slot that autograd saved, or a container. Recipes are therefore written with the same
locals as the modules that they describe, and nothing has to be freed by hand.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING

from memcalc.common.sizes import Shape
from memcalc.tables.dtypes import DType

if TYPE_CHECKING:
    from memcalc.autograd.graph import Node
    from memcalc.autograd.tape import Allocation, Tape


class Storage:
    """Device memory. Views share it; it is freed when the last reference to it goes."""

    __slots__ = ("allocation", "tape")

    def __init__(self, tape: Tape, allocation: Allocation) -> None:
        self.tape = tape
        self.allocation = allocation

    def __del__(self) -> None:
        self.allocation.dies = self.tape.clock

    def whole(self) -> AbstractContextManager[None]:
        """All of it is there inside: for code that reads a weight past its module, whose engine may have sharded it."""
        return nullcontext()

    def full_tensor(self, weight: Tensor) -> Tensor:
        """`weight`, which lies here, as code that reads it past its module has it: gathered, if it is sharded."""
        return weight


class Tensor:
    """A strided view of a storage, with its place in the autograd graph.

    `node` is what made it (None for leaves) and `slot` which output of that node it is. `is_view` says whether a view
    operation made it: a view keeps its base alive, so that autograd cannot add into it in place.
    """

    __slots__ = ("dtype", "is_view", "node", "shape", "slot", "storage", "stride")

    def __init__(  # noqa: PLR0913 (made for every operation: no object around its fields)
        self,
        shape: Shape,
        stride: Shape,
        dtype: DType,
        storage: Storage,
        node: Node | None = None,
        slot: int = 0,
        is_view: bool = False,
    ) -> None:
        self.shape = shape
        self.is_view = is_view
        self.stride = stride
        self.dtype = dtype
        self.storage = storage
        self.node = node
        self.slot = slot

    @property
    def tape(self) -> Tape:
        """The tape that records what is done with this tensor."""
        return self.storage.tape

    @property
    def requires_grad(self) -> bool:
        """Whether backward will ask for this tensor's gradient."""
        return self.node is not None

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    def detach(self) -> Tensor:
        """The same storage outside the graph."""
        return Tensor(self.shape, self.stride, self.dtype, self.storage)

    # Arithmetic is attached in memcalc.ops, which knows what each operation allocates and saves.


@lru_cache(maxsize=4096)
def contiguous_stride(shape: Shape) -> Shape:
    """Row-major strides of `shape`, in elements."""
    stride, step = [], 1
    for size in reversed(shape):
        stride.append(step)
        step *= max(size, 1)
    return tuple(reversed(stride))


@lru_cache(maxsize=4096)
def is_contiguous(shape: Shape, stride: Shape) -> bool:
    """Whether the elements lie in row-major order without gaps (dimensions of size one do not matter)."""
    step = 1
    for size, have in zip(reversed(shape), reversed(stride), strict=True):
        if size == 0:
            return True
        if size != 1:
            if have != step:
                return False
            step *= size
    return True


@lru_cache(maxsize=4096)
def dense_stride(shape: Shape, stride: Shape) -> Shape:
    """Strides of a new tensor that keeps the dimension order of `stride` (`torch.preserve_format`)."""
    if is_contiguous(shape, stride):
        return contiguous_stride(shape)
    order = sorted(range(len(shape)), key=lambda dim: (stride[dim], -dim))
    if _is_dense(shape, stride, order):
        return stride
    if any(stride[dim] == 0 and shape[dim] != 1 for dim in order):
        return _perm_stride(shape, _elementwise_order((stride,), shape))
    return _perm_stride(shape, order)


def _is_dense(shape: Shape, stride: Shape, order: list[int]) -> bool:
    """Whether the elements lie without gaps and overlaps, dimensions `order`ed from the innermost outwards."""
    step = 1
    for dim in order:
        if shape[dim] != 1:
            if stride[dim] != step:
                return False
            step *= shape[dim]
    return True


def _perm_stride(shape: Shape, order: list[int]) -> Shape:
    """Dense strides whose dimensions lie in `order`, innermost first."""
    out, step = [0] * len(shape), 1
    for dim in order:
        out[dim] = step
        step *= max(shape[dim], 1)
    return tuple(out)


def _elementwise_order(strides: tuple[Shape, ...], shape: Shape) -> list[int]:
    """Dimension order (innermost first) that TensorIterator chooses for operands of these strides.

    Source: `TensorIteratorBase::reorder_dimensions`: an insertion sort in which the first operand with an opinion
    (both strides non-zero and different) decides; broadcast dimensions have stride zero and no opinion.
    """
    order = list(range(len(shape) - 1, -1, -1))

    def should_swap(dim0: int, dim1: int) -> int:
        for stride in strides:
            stride0, stride1 = stride[dim0], stride[dim1]
            if stride0 == 0 or stride1 == 0:
                continue
            if stride0 < stride1:
                return -1
            if stride0 > stride1:
                return 1
            if shape[dim0] > shape[dim1]:
                return 1
        return 0

    for i in range(1, len(order)):
        dim1 = i
        for dim0 in range(i - 1, -1, -1):
            comparison = should_swap(order[dim0], order[dim1])
            if comparison > 0:
                order[dim0], order[dim1] = order[dim1], order[dim0]
                dim1 = dim0
            elif comparison < 0:
                break
    return order


@lru_cache(maxsize=4096)
def elementwise_stride(shape: Shape, operands: tuple[tuple[Shape, Shape], ...]) -> Shape:
    """Strides of the result of an element-wise operation on `operands` (shape, stride) broadcast to `shape`."""
    if all(is_contiguous(*operand) for operand in operands if operand[0] == shape) and any(
        operand[0] == shape for operand in operands
    ):
        return contiguous_stride(shape)
    return _perm_stride(shape, _elementwise_order(tuple(_broadcast(s, st, shape) for s, st in operands), shape))


def _broadcast(shape: Shape, stride: Shape, target: Shape) -> Shape:
    """Strides of `shape` expanded to `target`: zero wherever a dimension is repeated."""
    lead = len(target) - len(shape)
    return (0,) * lead + tuple(
        0 if size == 1 and target[lead + dim] != 1 else stride[dim] for dim, size in enumerate(shape)
    )


def broadcast_stride(tensor: Tensor, target: Shape) -> Shape:
    """Strides of `tensor` expanded to the shape `target`."""
    return _broadcast(tensor.shape, tensor.stride, target)


@lru_cache(maxsize=4096)
def view_stride(shape: Shape, stride: Shape, target: Shape) -> Shape | None:
    """Strides that let a tensor be seen as `target` without a copy, or None where only a copy will do.

    Source: ATen `computeStride` (TensorUtils.cpp).
    """
    if prod(shape) == 0 or not shape:
        return contiguous_stride(target)
    out = [0] * len(target)
    view_dim = len(target) - 1
    chunk_base_stride = stride[-1]
    tensor_numel = view_numel = 1
    for dim in range(len(shape) - 1, -1, -1):
        tensor_numel *= shape[dim]
        if dim == 0 or (shape[dim - 1] != 1 and stride[dim - 1] != tensor_numel * chunk_base_stride):
            while view_dim >= 0 and (view_numel < tensor_numel or target[view_dim] == 1):
                out[view_dim] = view_numel * chunk_base_stride
                view_numel *= target[view_dim]
                view_dim -= 1
            if view_numel != tensor_numel:
                return None
            if dim > 0:
                chunk_base_stride = stride[dim - 1]
                tensor_numel = view_numel = 1
    return tuple(out) if view_dim == -1 else None
