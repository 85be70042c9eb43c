"""Operations that choose elements: top-k, sorting, rows by index, and what mixtures of experts do with them.

Their gradients are written into a zero-filled tensor of the input's size: in place on a GPU, into a second tensor where
PyTorch's trackers look on. Source: `areAnyTensorSubclassLike` in torch/csrc/autograd/FunctionsManual.cpp, PyTorch 2.14.
"""

from __future__ import annotations

from memcalc.autograd.graph import Grads, Node, record
from memcalc.autograd.tensor import Tensor
from memcalc.common.sizes import Shape
from memcalc.ops.elementwise import empty_like
from memcalc.tables.dtypes import INT64


def _filled(node: Node, shape: Shape, grad: Tensor) -> Tensor:
    """Zeros of `shape` with `grad` written into them."""
    zeros = node.tape.empty(shape, grad.dtype)
    return node.tape.empty(shape, grad.dtype) if node.tape.sum_out_of_place else zeros


def _scatter_backward(node: Node, grads: Grads) -> list[Tensor | None]:
    """The gradient of what was chosen, put where it was chosen from."""
    grad = grads[0]
    return [None if grad is None else _filled(node, node.context, grad)]


def _chosen(x: Tensor, shape: Shape) -> tuple[Tensor, Tensor]:
    """Values of `shape` out of x, and their indices, which are kept."""
    values, indices = x.tape.empty(shape, x.dtype), x.tape.empty(shape, INT64)
    node = record(x.tape, values, _scatter_backward, (x,), x.shape)
    if node is not None:
        node.save(indices)
    return values, indices


def topk(x: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The largest `count` elements along the last dimension, and their indices, which are kept."""
    return _chosen(x, (*x.shape[:-1], count))


def max(x: Tensor, *, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """The largest element along the last dimension, and its index, which is kept."""
    return _chosen(x, (*x.shape[:-1], 1) if keepdim else x.shape[:-1])


def sort(ids: Tensor) -> tuple[Tensor, Tensor]:
    """Integers in order, and where each came from."""
    return empty_like(ids.detach()), empty_like(ids.detach())


def index_select(x: Tensor, indices: Tensor, dim: int = 0) -> Tensor:
    """x[indices], or the same along `dim`: a copy; keeps the indices."""
    out = x.tape.empty((*x.shape[:dim], *indices.shape, *x.shape[dim + 1 :]), x.dtype)
    node = record(x.tape, out, _scatter_backward, (x,), x.shape)
    if node is not None:
        node.save(indices)
    return out


def index_list(x: Tensor, dim: int) -> Tensor:
    """One element of x along `dim`, the dimension kept, by an index that is a list: a copy; keeps the index."""
    dim %= len(x.shape)
    index = x.tape.empty((1,), INT64)
    out = x.tape.empty((*x.shape[:dim], 1, *x.shape[dim + 1 :]), x.dtype)
    node = record(x.tape, out, _scatter_backward, (x,), x.shape)
    if node is not None:
        node.save(index)
    return out


def scatter_(base: Tensor, indices: Tensor, values: Tensor) -> Tensor:
    """`base`, which needs no gradient, with `values` put at `indices` in place: keeps the indices."""
    out = Tensor(base.shape, base.stride, base.dtype, base.storage)
    node = record(base.tape, out, _gather_backward, (values,), values.shape)
    if node is not None:
        node.save(indices)
    return out


def index_add_(base: Tensor, indices: Tensor, values: Tensor) -> Tensor:
    """`base` with `values` added to its rows `indices` in place: keeps both."""
    out = Tensor(base.shape, base.stride, base.dtype, base.storage, base.node, base.slot)
    node = record(base.tape, out, _index_add_backward, (base, values), values.shape)
    if node is not None:
        node.save(indices)
        node.save(values)
    return out


def index_add(base: Tensor, indices: Tensor, values: Tensor) -> Tensor:
    """The same as a copy of `base`."""
    out = empty_like(base)
    node = record(base.tape, out, _index_add_backward, (base, values), values.shape)
    if node is not None:
        node.save(indices)
        node.save(values)
    return out


def _index_add_backward(node: Node, grads: Grads) -> list[Tensor | None]:
    (grad,) = grads
    if grad is None:
        return [None, None]
    return [grad, node.tape.empty(node.context, grad.dtype) if node.needs(1) else None]


def scatter(base: Tensor, indices: Tensor) -> Tensor:
    """`base` with a number put at `indices`, a copy: keeps the indices."""
    out = empty_like(base)
    node = record(base.tape, out, _gather_backward, (base,), base.shape)
    if node is not None:
        node.save(indices)
    return out


def _gather_backward(node: Node, grads: Grads) -> list[Tensor | None]:
    grad = grads[0]
    return [None if grad is None else node.tape.empty(node.context, grad.dtype)]


def masked_scatter(x: Tensor, mask: Tensor, source: Tensor) -> Tensor:
    """x [b, s, h] with the rows of `source` where mask [b, s, 1] holds, a copy: keeps the mask."""
    out = empty_like(x)
    node = record(x.tape, out, _masked_scatter_backward, (x, source), source.shape)
    if node is not None:
        node.save(mask)
    return out


def _masked_scatter_backward(node: Node, grads: Grads) -> list[Tensor | None]:
    (grad,) = grads
    if grad is None:
        return [None, None]
    first = empty_like(grad) if node.needs(0) else None
    second = node.tape.empty(node.context, grad.dtype) if node.needs(1) else None
    return [first, second]


def index_mask(x: Tensor, mask: Tensor, count: int) -> Tensor:
    """The `count` elements [...] of x [b, s, ...] where mask [b, s] holds, a copy: keeps the mask."""
    where = _found(mask, count)
    out = x.tape.empty((count, *x.shape[len(mask.shape) :]), x.dtype)
    del where
    node = record(x.tape, out, _scatter_backward, (x,), x.shape)
    if node is not None:
        node.save(mask)
    return out


def index_put_(x: Tensor, mask: Tensor, rows: Tensor) -> Tensor:
    """x [b, s, h] with `rows` put in place where mask [b, s] holds: keeps the mask."""
    where = _found(mask, rows.shape[0])
    out = Tensor(x.shape, x.stride, x.dtype, x.storage)
    del where
    node = record(x.tape, out, _index_put_backward, (x, rows), rows.shape)
    if node is not None:
        node.save(mask)
    return out


def index_put_row_(x: Tensor, mask: Tensor, value: Tensor, count: int) -> Tensor:
    """x [b, s, h] with `value` [h] put in place at the `count` places at most where mask [b, s] holds: keeps the mask.

    x is a view (of what a linear layer makes), so that backward copies its gradient first.
    """
    where = _found(mask, count)
    out = Tensor(x.shape, x.stride, x.dtype, x.storage, x.node, x.slot)
    del where
    node = record(x.tape, out, _index_put_row_backward, (x, value), count)
    if node is not None:
        node.save(mask)
    return out


def _index_put_row_backward(node: Node, grads: Grads) -> list[Tensor | None]:
    (grad,) = grads
    edge = node.edges[1]
    if grad is None or edge is None:
        return [grad, None]
    whole = empty_like(grad)
    kept = empty_like(grad)
    rows = node.tape.empty((node.context, grad.shape[-1]), grad.dtype)
    out = node.tape.empty(edge[2], grad.dtype)
    del rows, kept
    return [whole, out]


def _found(mask: Tensor, count: int) -> Tensor:
    """The places where a mask holds."""
    return mask.tape.empty((count, len(mask.shape)), INT64)


def _index_put_backward(node: Node, grads: Grads) -> list[Tensor | None]:
    (grad,) = grads
    if grad is None:
        return [None, None]
    rows = node.tape.empty(node.context, grad.dtype) if node.needs(1) else None
    return [empty_like(grad) if node.needs(0) else None, rows]


def gather(x: Tensor, indices: Tensor) -> Tensor:
    """The elements of x at `indices` along one dimension: keeps the indices, and x."""
    out = x.tape.empty(indices.shape, x.dtype)
    node = record(x.tape, out, _scatter_backward, (x,), x.shape)
    if node is not None:
        node.save(x)
        node.save(indices)
    return out
