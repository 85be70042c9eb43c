"""Norms that go with convolutions, and the CTC loss: what each keeps.

Source: tools/autograd/derivatives.yaml and aten/src/ATen/native of PyTorch 2.14.
"""

from __future__ import annotations

from math import prod

from memcalc.autograd.graph import Grads, Node, record
from memcalc.autograd.tensor import Tensor, dense_stride
from memcalc.ops.elementwise import fp32_under_autocast
from memcalc.ops.reduction import sum
from memcalc.ops.views import contiguous
from memcalc.tables.dtypes import FP32


def group_norm(x: Tensor, weight: Tensor, bias: Tensor, groups: int) -> Tensor:
    """The fused GroupNorm of x [b, c, ...] keeps its operands, and mean and reciprocal deviation [b, groups]."""
    x, weight, bias = fp32_under_autocast(x), fp32_under_autocast(weight), fp32_under_autocast(bias)
    tape = x.tape
    out = tape.empty(x.shape, x.dtype)
    mean_, rstd = (tape.empty((x.shape[0], groups), x.dtype) for _ in range(2))
    _group_norm_scratch(x, groups)
    node = record(tape, out, _group_norm_backward, (x, weight, bias), (x.shape, groups))
    if node is not None:
        for tensor in (x, weight, mean_, rstd):
            node.save(tensor, output=tensor in (mean_, rstd))
    return out


def _group_norm_scratch(x: Tensor, groups: int) -> None:
    """What the kernel allocates for itself: x row by row, its statistics in fp32, scale and shift of each channel.

    Source: aten/src/ATen/native/cuda/group_norm_kernel.cu, read off an allocator's history.
    """
    tape = x.tape
    if tape.device is None:
        return
    row_by_row = contiguous(x)
    wide = [] if x.dtype is FP32 else [tape.empty((x.shape[0], groups), FP32) for _ in range(2)]
    if prod(x.shape[2:]) > 1:
        wide += [tape.empty(x.shape[:2], FP32) for _ in range(2)]
    del row_by_row, wide


def _group_norm_backward(node: Node, grads: Grads) -> list[Tensor | None]:
    """The gradients of all operands at once, and sums of each channel and group for the kernel alone."""
    (grad,) = grads
    if grad is None:
        return [None, None, None]
    tape, (shape, groups) = node.tape, node.context
    made = [None if edge is None else tape.empty(edge[2], edge[3]) for edge in node.edges]
    if tape.device is not None:
        sums = [tape.empty(shape[:2], FP32) for _ in range(2)]
        if node.needs(0):
            sums += [tape.empty((shape[0], groups), FP32) for _ in range(2)]
            sums.append(tape.empty(shape[:2], FP32))
        del sums
    return made


def batch_norm(x: Tensor, weight: Tensor, bias: Tensor, running: tuple[Tensor, Tensor]) -> Tensor:
    """BatchNorm of x [b, c, ...] keeps x, the weight, the `running` statistics, and those of the batch in fp32."""
    tape = x.tape
    out = tape.empty(x.shape, x.dtype, dense_stride(x.shape, x.stride))
    mean_, rstd = (tape.empty(weight.shape, FP32) for _ in range(2))
    node = record(tape, out, _batch_norm_backward, (x, weight, bias), (x.shape, x.stride))
    if node is not None:
        for tensor in (x, weight, *running, mean_, rstd):
            node.save(tensor)
    return out


def _batch_norm_backward(node: Node, grads: Grads) -> list[Tensor | None]:
    (grad,) = grads
    if grad is None:
        return [None, None, None]
    shape, stride = node.context
    layouts = (dense_stride(shape, stride), None, None)
    return [
        None if edge is None else node.tape.empty(edge[2], edge[3], layout)
        for edge, layout in zip(node.edges, layouts, strict=True)
    ]


def weight_norm(direction: Tensor, length: Tensor) -> Tensor:
    """A weight [out, in, width] of this direction and with a length for each place [1, 1, width]; keeps both."""
    tape = direction.tape
    out = tape.empty(direction.shape, direction.dtype)
    norms = tape.empty(length.shape, FP32 if length.dtype.itemsize < 4 else length.dtype)
    node = record(tape, out, _operand_gradients, (direction, length), direction.shape)
    if node is not None:
        for tensor in (direction, length, norms):
            node.save(tensor)
    return out


def ctc_loss(log_probs: Tensor, targets: Tensor, length: int) -> Tensor:
    """The sum of the CTC losses of log_probs [s, b, V]: keeps its operands, and all paths [b, s, 2·length + 1]."""
    steps, batch, _ = log_probs.shape
    out = log_probs.tape.empty((batch,), log_probs.dtype)
    paths = log_probs.tape.empty((batch, steps, 2 * length + 1), log_probs.dtype)
    node = record(log_probs.tape, out, _ctc_loss_backward, (log_probs,), paths.shape)
    if node is not None:
        for tensor in (log_probs, targets, out, paths):
            node.save(tensor)
    return sum(out, 0)


def _ctc_loss_backward(node: Node, grads: Grads) -> list[Tensor | None]:
    (grad,) = grads
    edge = node.edges[0]
    if grad is None or edge is None:
        return [None]
    back = node.tape.empty(node.context, grad.dtype)
    out = node.tape.empty(edge[2], grad.dtype)
    del back
    return [out]


def _operand_gradients(node: Node, grads: Grads) -> list[Tensor | None]:
    """The gradients of all operands at once."""
    (grad,) = grads
    return [None if grad is None or edge is None else node.tape.empty(edge[2], edge[3]) for edge in node.edges]
