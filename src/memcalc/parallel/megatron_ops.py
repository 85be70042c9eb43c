"""Megatron-Core's own autograd functions, as operations on the tape: what each keeps and makes. Tensors are [s, b, h].

Source: megatron/core/tensor_parallel/{layers,mappings,cross_entropy}.py and fusions/fused_bias_swiglu.py of
Megatron-Core 0.16; the fused ones are one kernel (torch.compile).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from memcalc.autograd.graph import Grads, Node, record
from memcalc.autograd.tensor import Tensor, contiguous_stride
from memcalc.common.sizes import Shape
from memcalc.ops.elementwise import to
from memcalc.parallel import traffic
from memcalc.tables.dtypes import BOOL, FP32, INT64


@dataclass(eq=False)
class TensorRanks:
    """The tensor-parallel ranks of a model, and the buffer in which they gather their parts of a sequence.

    Megatron keeps that buffer for good and makes it as large as what was ever gathered (`GlobalMemoryBuffer`).
    """

    size: int = 1
    sequence: bool = False
    """Whether the residual stream is cut along the sequence."""
    gathered: int = 0
    """Bytes of the buffer."""

    def whole(self, shape: Shape) -> Shape:
        """The shape of a part of a sequence on all ranks together."""
        return (shape[0] * self.size, *shape[1:]) if self.sequence else shape

    def part(self, shape: Shape) -> Shape:
        """The shape of this rank's part of a sequence."""
        return (shape[0] // self.size, *shape[1:]) if self.sequence else shape


def linear(x: Tensor, weight: Tensor, ranks: TensorRanks, *, column: bool) -> Tensor:
    """x [s, b, in] times weight [out, in] transposed: keeps x as it comes, and the weight.

    A layer divided by its outputs (`column`) gathers x from the ranks where they share a sequence, in a buffer that
    stands, and again in backward. Its input's gradient is summed over the ranks, in place or to this rank's part.
    """
    tape, gathers = x.tape, column and ranks.sequence
    whole = ranks.whole(x.shape) if gathers else x.shape
    if gathers:
        _gather(x, whole, ranks)
    out = tape.empty((*whole[:-1], weight.shape[0]), x.dtype)
    tape.multiplied.setdefault(tape.phase, tape.clock - 1)
    node = record(tape, out, _linear_backward, (x, weight), (x.shape, whole, weight.shape, ranks, column))
    if node is not None:
        node.save(x)
        node.save(weight)
    return out


def _gather(x: Tensor, whole: Shape, ranks: TensorRanks) -> None:
    nbytes = prod(whole) * x.dtype.itemsize
    ranks.gathered = max(ranks.gathered, nbytes)
    traffic.gather(x.tape, nbytes, ranks.size)


def _linear_backward(node: Node, grads: Grads) -> list[Tensor | None]:
    (grad,) = grads
    if grad is None:
        return [None, None]
    tape, (shape, whole, weight, ranks, column) = node.tape, node.context
    of_input = tape.empty(whole, grad.dtype)
    tape.multiplied.setdefault(tape.phase, tape.clock - 1)
    nbytes = prod(whole) * grad.dtype.itemsize
    part = None
    if column and ranks.sequence:
        traffic.gather(tape, nbytes, ranks.size)
        part = tape.empty(shape, grad.dtype)
        traffic.scatter(tape, nbytes, ranks.size)
    elif column and ranks.size > 1:
        traffic.reduce(tape, nbytes, ranks.size)
    of_weight = tape.empty(weight, grad.dtype)
    return [of_input if part is None else part, of_weight]


def reduce_output(x: Tensor, ranks: TensorRanks) -> Tensor:
    """The sum of x over the ranks: in place, or this rank's part of the sequence of it."""
    if ranks.size == 1:
        return x
    nbytes = x.numel * x.dtype.itemsize
    if not ranks.sequence:
        traffic.reduce(x.tape, nbytes, ranks.size)
        return x
    traffic.scatter(x.tape, nbytes, ranks.size)
    out = x.tape.empty(ranks.part(x.shape), x.dtype)
    record(x.tape, out, _gather_gradient, (x,), (x.shape, ranks))
    return out


def _gather_gradient(node: Node, grads: Grads) -> list[Tensor | None]:
    (grad,) = grads
    if grad is None:
        return [None]
    shape, ranks = node.context
    traffic.gather(node.tape, prod(shape) * grad.dtype.itemsize, ranks.size)
    return [node.tape.empty(shape, grad.dtype)]


def fused_swiglu(x: Tensor) -> Tensor:
    """silu of the first half of x times the second: one kernel, which keeps x."""
    out = x.tape.empty((*x.shape[:-1], x.shape[-1] // 2), x.dtype)
    node = record(x.tape, out, _of_input, (x,), x.shape)
    if node is not None:
        node.save(x)
    return out


def fused_bias_gelu(x: Tensor, bias: Tensor) -> Tensor:
    """gelu(x + bias): one kernel, which keeps both."""
    out = x.tape.empty(x.shape, x.dtype)
    node = record(x.tape, out, _of_input_and_bias, (x, bias), (x.shape, bias.shape))
    if node is not None:
        node.save(x)
        node.save(bias)
    return out


def _of_input(node: Node, grads: Grads) -> list[Tensor | None]:
    (grad,) = grads
    return [None if grad is None else node.tape.empty(node.context, grad.dtype)]


def _of_input_and_bias(node: Node, grads: Grads) -> list[Tensor | None]:
    (grad,) = grads
    if grad is None:
        return [None, None]
    first = node.tape.empty(node.context[0], grad.dtype)
    return [first, node.tape.empty(node.context[1], grad.dtype)]


def bias_dropout_add(x: Tensor, bias: Tensor | None, residual: Tensor, dropout: float) -> Tensor:
    """residual + dropout(x + bias): one kernel, which keeps the mask of the dropout."""
    tape = x.tape
    out = tape.empty(x.shape, x.dtype)
    mask = tape.empty(x.shape, BOOL) if dropout > 0 and tape.dropout_enabled else None
    node = record(tape, out, _bias_dropout_add_backward, (x, bias, residual), (x.shape, mask is not None))
    if node is not None and mask is not None:
        node.save(mask)
    return out


def _bias_dropout_add_backward(node: Node, grads: Grads) -> list[Tensor | None]:
    (grad,) = grads
    if grad is None:
        return [None, None, None]
    shape, dropped = node.context
    of_x = node.tape.empty(shape, grad.dtype) if dropped else grad
    of_bias = node.tape.empty(shape[-1:], grad.dtype) if node.needs(1) else None
    return [of_x, of_bias, grad]


def vocab_parallel_cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """Losses [s, b] of this rank's columns of logits [s, b, V / ranks]: keeps their softmax in fp32."""
    tape, rows = logits.tape, logits.shape[:-1]
    wide = tape.empty(logits.shape, FP32)
    largest, _indices = tape.empty(rows, FP32), tape.empty(rows, INT64)
    del _indices
    mask = _outside(target)
    masked = _shifted(target)
    places = tape.empty((prod(rows),), INT64)
    predicted = tape.empty((prod(rows),), FP32)
    predicted = tape.empty((prod(rows),), FP32)
    summed = tape.empty(rows, FP32)
    del places
    logarithm = tape.empty(rows, FP32)
    loss = tape.empty(rows, FP32)
    del logarithm
    node = record(tape, loss, _cross_entropy_backward, (logits,), (logits.shape, logits.dtype))
    if node is not None:
        for kept in (wide, mask, masked):
            node.save(kept)
    del largest, predicted, summed
    return loss


def _outside(ids: Tensor) -> Tensor:
    """Which ids lie outside this rank's part of the vocabulary: either comparison, and both."""
    below, above = ids.tape.empty(ids.shape, BOOL), ids.tape.empty(ids.shape, BOOL)
    out = ids.tape.empty(ids.shape, BOOL)
    del below, above
    return out


def _shifted(ids: Tensor) -> Tensor:
    """A copy of ids, less where this rank's part begins."""
    copied = ids.tape.empty(ids.shape, INT64)
    out = ids.tape.empty(ids.shape, INT64)
    del copied
    return out


def _cross_entropy_backward(node: Node, grads: Grads) -> list[Tensor | None]:
    """The softmax becomes the gradient in place; autograd casts it to the dtype of the logits."""
    (grad,) = grads
    if grad is None:
        return [None]
    shape, dtype = node.context
    softmax = Tensor(shape, contiguous_stride(shape), FP32, node.saved_storages()[0])
    return [to(softmax, dtype)]


def masked_ids(ids: Tensor, ranks: TensorRanks) -> tuple[Tensor, Tensor | None]:
    """Ids for this rank's part of an embedding, and which of them are not its own."""
    if ranks.size == 1:
        return ids, None
    mask = _outside(ids)
    return _shifted(ids), mask
