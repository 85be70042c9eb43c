"""What tensor-parallel modules send to each other, as operations on the tape: each makes what torch's DTensor makes.

Source: torch/distributed/tensor (functional collectives are out of place) of PyTorch 2.14.
"""

from __future__ import annotations

from memcalc.autograd.graph import Grads, Node, record
from memcalc.autograd.tensor import Tensor
from memcalc.common.sizes import Shape
from memcalc.parallel import traffic


def copy_to_ranks(x: Tensor, ranks: int) -> Tensor:
    """x, whose gradient is summed over the ranks: the partial one and the sum coexist."""
    if x.node is None:
        return x
    out = Tensor(x.shape, x.stride, x.dtype, x.storage, is_view=True)
    record(x.tape, out, _sum_gradient, (x,), ranks)
    return out


def _sum_gradient(node: Node, grads: Grads) -> list[Tensor | None]:
    (grad,) = grads
    if grad is None:
        return [None]
    traffic.reduce(node.tape, _nbytes(grad), node.context)
    return [node.tape.empty(grad.shape, grad.dtype)]


def _nbytes(x: Tensor) -> int:
    return x.numel * x.dtype.itemsize


def all_reduce(x: Tensor, ranks: int) -> Tensor:
    """The sum of x over the ranks, in a tensor of its own; the gradient goes to every rank as it is."""
    out = x.tape.empty(x.shape, x.dtype)
    traffic.reduce(x.tape, _nbytes(x), ranks)
    record(x.tape, out, _pass_gradient, (x,))
    return out


def _pass_gradient(node: Node, grads: Grads) -> list[Tensor | None]:
    return [grads[0]]


def gather_last(x: Tensor, width: int, ranks: int) -> Tensor:
    """x of all ranks side by side along the last dimension: gathered pieces, and then what they are put together to.

    The gradient is cut by a copy.
    """
    shape = (*x.shape[:-1], width)
    pieces = x.tape.empty(shape, x.dtype)
    out = x.tape.empty(shape, x.dtype)
    traffic.gather(x.tape, _nbytes(out), ranks)
    record(x.tape, out, _cut_gradient, (x,), x.shape)
    del pieces
    return out


def _cut_gradient(node: Node, grads: Grads) -> list[Tensor | None]:
    (grad,) = grads
    shape: Shape = node.context
    return [None if grad is None else node.tape.empty(shape, grad.dtype)]


def gather_sequence(x: Tensor, ranks: int) -> Tensor:
    """x [b, s / ranks, h] of all ranks along the sequence [b, s, h]: pieces, then what they are put together to.

    The gradient is summed and cut: the partial one, its copy arranged by rank, and the piece coexist.
    """
    shape = (x.shape[0], x.shape[1] * ranks, *x.shape[2:])
    pieces = x.tape.empty(shape, x.dtype)
    out = x.tape.empty(shape, x.dtype)
    traffic.gather(x.tape, _nbytes(out), ranks)
    record(x.tape, out, _scatter_gradient, (x,), ranks)
    del pieces
    return out


def _scatter_gradient(node: Node, grads: Grads) -> list[Tensor | None]:
    (grad,) = grads
    return [None if grad is None else _scattered(grad, node.context)]


def scatter_sequence(x: Tensor, ranks: int) -> Tensor:
    """The sum of x [b, s, h] over the ranks, of which each takes a piece [b, s / ranks, h] of the sequence."""
    out = _scattered(x, ranks)
    record(x.tape, out, _gather_gradient, (x,), ranks)
    return out


def _scattered(x: Tensor, ranks: int) -> Tensor:
    x.tape.send(traffic.REDUCE_SCATTER, _nbytes(x) * (ranks - 1) // ranks)
    arranged = x.tape.empty(x.shape, x.dtype)
    out = x.tape.empty((x.shape[0], x.shape[1] // ranks, *x.shape[2:]), x.dtype)
    del arranged
    return out


def _gather_gradient(node: Node, grads: Grads) -> list[Tensor | None]:
    (grad,) = grads
    if grad is None:
        return [None]
    shape = (grad.shape[0], grad.shape[1] * node.context, *grad.shape[2:])
    pieces = node.tape.empty(shape, grad.dtype)
    out = node.tape.empty(shape, grad.dtype)
    traffic.gather(node.tape, _nbytes(out), node.context)
    del pieces
    return [out]
