"""torchao's float8 linear layer: three products in 8 bits, of operands that are scaled and cast anew for each.

Source: torchao 0.18, float8/{float8_linear,float8_training_tensor,float8_ops,float8_utils}.py, recipe `tensorwise`, in
eager PyTorch (torch.compile fuses the casts). It keeps what a wide layer keeps: the input and the weight.
"""

from __future__ import annotations

from typing import NamedTuple

from memcalc.autograd.graph import Grads, Node, record
from memcalc.autograd.tensor import Tensor
from memcalc.ops.elementwise import add, empty_like, to
from memcalc.ops.views import contiguous, reshape, transpose, view
from memcalc.tables.dtypes import FP8, FP32, FP64, DType


class _Float8(NamedTuple):
    """A tensor in float8 and its scale."""

    values: Tensor
    scale: Tensor

    def turned(self) -> _Float8:
        """Rows and columns exchanged: a view."""
        return _Float8(transpose(self.values, 0, 1), self.scale)


def linear_float8(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [..., in] @ weight.T, weight [out, in], both in float8; a bias is added after it, in a new tensor."""
    tape = x.tape
    if tape.autocast is not None:
        x = to(x, tape.autocast)
    columns = transpose(weight, 0, 1)
    out = _multiplied(_cast(x), _cast(columns.detach()), x.dtype)
    out = view(out, *x.shape[:-1], weight.shape[0])
    node = record(tape, out, _linear_backward, (x, columns), (x.shape, x.stride, weight.shape, weight.dtype))
    if node is not None:
        node.save(x)
        node.save(columns)
    return out if bias is None else add(out, to(bias, out.dtype))


def _linear_backward(node: Node, grads: Grads) -> list[Tensor | None]:
    """Every operand is cast once more, and what lies the wrong way for float8 is copied; casts stay until the end."""
    (grad,) = grads
    if grad is None:
        return [None, None]
    shape, stride, (outputs, inputs), weight_dtype = node.context
    storages = node.saved_storages()  # where activations are offloaded, the input's alone
    x_storage, weight_storage = storages[0], storages[-1]
    flat = reshape(grad.detach(), -1, outputs)
    columns = Tensor((inputs, outputs), (1, inputs), weight_dtype, weight_storage)
    casts = [_cast(flat), _cast(columns)]
    first = view(_multiplied(casts[0], casts[1].turned(), grad.dtype), *shape)
    rows = reshape(Tensor(shape, stride, grad.dtype, x_storage), -1, inputs)
    casts += [_cast(flat), _cast(rows)]
    second = _multiplied(casts[2].turned(), casts[3], grad.dtype)
    del casts, rows
    return [first, transpose(second, 0, 1)]


def _cast(x: Tensor) -> _Float8:
    """x in float8, laid out as x is: its largest magnitude is found first, then it is scaled and clamped in fp32."""
    x = x.detach()
    tape = x.tape
    magnitude = empty_like(x)
    largest = tape.empty((), x.dtype)
    ordered = contiguous(magnitude)
    tape.reduce(ordered, range(len(x.shape)))
    del magnitude, ordered
    wide = tape.empty((), FP64)
    steps = [tape.empty((), FP64) for _ in range(3)]
    del steps[:2]
    scale = tape.empty((), FP32)
    del steps, wide, largest
    in_fp32 = to(x, FP32)
    scaled = empty_like(in_fp32)
    del in_fp32
    clamped = empty_like(scaled)
    return _Float8(empty_like(clamped, FP8), scale)


def _multiplied(left: _Float8, right: _Float8, dtype: DType) -> Tensor:
    """left [..., k] @ right [k, n]: cuBLASLt takes the one by rows and the other by columns alone."""
    a, b = left.values, right.values
    tape = a.tape
    a = reshape(a, -1, a.shape[-1])
    if not _by_rows(a):
        a = contiguous(a)
    if _by_rows(b):
        b = transpose(contiguous(transpose(b, 0, 1)), 0, 1)
    inverse = tape.empty((), FP32), tape.empty((), FP32)
    out = tape.empty((a.shape[0], b.shape[1]), dtype)
    tape.multiplied.setdefault(tape.phase, tape.clock - 1)
    del inverse
    return out


def _by_rows(x: Tensor) -> bool:
    return x.stride[0] > x.stride[1]
