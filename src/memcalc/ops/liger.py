"""Liger's kernels for norms, gated activations and rotary embeddings: what each keeps, and what it writes in place.

Source: liger-kernel 0.8.5 (ops/{rms_norm,swiglu,geglu,rope}.py). Every kernel copies operands that are not contiguous.
"""

from __future__ import annotations

from memcalc.autograd.graph import Grads, Node, record
from memcalc.autograd.tensor import Tensor, contiguous_stride
from memcalc.ops.elementwise import empty_like, to
from memcalc.ops.views import contiguous, transpose
from memcalc.tables.dtypes import FP32
from memcalc.tables.liger_kernels import STREAMING_MULTIPROCESSORS


def liger_rms_norm(x: Tensor, weight: Tensor, *, in_place: bool) -> Tensor:
    """RMSNorm in x's dtype: keeps x and the reciprocal root of each row.

    Its gradient is the incoming one, rewritten; without `in_place` it is a new tensor.
    """
    tape = x.tape
    rows = contiguous(x.detach())
    out = tape.empty(x.shape, x.dtype)
    rstd = tape.empty(x.shape[:-1], FP32)
    node = record(tape, out, _rms_norm_backward, (x, weight), (in_place, weight.dtype))
    if node is not None:
        for tensor in (rows, weight, rstd):
            node.save(tensor)
    return out


def _rms_norm_backward(node: Node, grads: Grads) -> list[Tensor | None]:
    (grad,) = grads
    if grad is None:
        return [None, None]
    in_place, dtype = node.context
    grad = contiguous(grad)
    width = grad.shape[-1]
    partial = node.tape.empty((STREAMING_MULTIPROCESSORS, width), FP32) if node.needs(1) else None
    first = grad if in_place else empty_like(grad)
    if partial is None:
        return [first, None]
    summed = node.tape.empty((width,), FP32)
    return [first, to(summed, dtype)]


def liger_glu(gate: Tensor, up: Tensor) -> Tensor:
    """act(gate) · up: keeps both, and backward writes their gradients over them."""
    tape = gate.tape
    left, right = contiguous(gate.detach()), contiguous(up.detach())
    out = empty_like(left)
    node = record(tape, out, _liger_glu_backward, (gate, up), (gate.shape, gate.dtype))
    if node is not None:
        node.save(left)
        node.save(right)
    return out


def _liger_glu_backward(node: Node, grads: Grads) -> list[Tensor | None]:
    (grad,) = grads
    if grad is None:
        return [None, None]
    contiguous(grad)
    shape, dtype = node.context
    return [Tensor(shape, contiguous_stride(shape), dtype, storage) for storage in node.saved_storages()]


def liger_rope(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Query and key [b, heads, s, d] rotated in place, where they lie as [b, s, heads, d]: keeps cos and sin."""
    tape = query.tape
    rotated = [_laid_out(x.detach()) for x in (query, key)]
    tables = [contiguous(table) for table in (cos, sin)]
    node = record(tape, rotated[0], _rotary_backward, (query, key))
    rotated[1].node, rotated[1].slot = node, 1
    if node is not None:
        for table in tables:
            node.save(table)
    return rotated[0], rotated[1]


def _laid_out(x: Tensor) -> Tensor:
    """x [b, heads, s, d], copied unless it lies as [b, s, heads, d]."""
    return transpose(contiguous(transpose(x, 1, 2)), 1, 2)


def _rotary_backward(node: Node, grads: Grads) -> list[Tensor | None]:
    return [None if grad is None else _laid_out(grad) for grad in grads]
