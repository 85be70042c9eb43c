"""Matrix multiplications: each keeps the operand that the other's gradient needs, and the 16-bit casts of autocast.

Sources: aten/src/ATen/native/{Linear,LinearAlgebra}.cpp and torch/csrc/autograd/FunctionsManual.cpp of PyTorch 2.14.
"""

from __future__ import annotations

from math import prod

from memcalc.autograd.graph import AccumulateGrad, Grads, Node, record
from memcalc.autograd.tape import BEFORE, WEIGHTS, Tape
from memcalc.autograd.tensor import Tensor, contiguous_stride, is_contiguous
from memcalc.common.sizes import Shape
from memcalc.ops.elementwise import add, add_, broadcast_shapes, empty_like, to
from memcalc.ops.views import contiguous, expand, reshape, transpose, view
from memcalc.tables.dtypes import DType, short


def cached_cast(x: Tensor) -> Tensor:
    """The autocast policy of matrix multiplications: x in the 16-bit dtype.

    The cast of a trained fp32 weight (of a leaf of the graph that is no view) is made once per autocast context, which
    keeps it until it exits.
    """
    tape = x.tape
    dtype = tape.autocast
    if dtype is None or x.dtype is dtype or not x.dtype.floating:
        return x
    if not isinstance(x.node, AccumulateGrad) or x.is_view:
        out = to(x, dtype)
        if x.storage.allocation.row == WEIGHTS:
            out.storage.allocation.row = WEIGHTS
            out.storage.allocation.name = f"{short(dtype)} copies for matmuls"
        return out
    cached = tape.cast_cache.get(id(x.node))
    if cached is None:
        cached = to(x, dtype)
        allocation = cached.storage.allocation
        allocation.row, allocation.name = WEIGHTS, f"{short(dtype)} copies for matmuls"
        tape.cast_cache[id(x.node)] = cached
        if tape.casts_outlast_step:
            tape.undo_last()
            allocation.born = BEFORE
            tape.standing_casts += allocation.nbytes * getattr(x, "copies", 1)
            if tape.casts_precede and cached.node is not None:
                cached.node.sequence -= 1 << 40  # made in the first micro-batch's forward: its backward comes last
    return cached


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias, over the last dimension of x."""
    out = _linear(x, weight, bias)
    if x.tape.keeps_linear_inputs and out.node is not None:
        out.node.save(x)
    return out


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if x.tape.autocast is not None:
        bias = None if bias is None else cached_cast(bias)
        weight = cached_cast(weight)
        x = cached_cast(x)
    lead, width = x.shape[:-1], weight.shape[0]
    rows = prod(lead)
    if len(lead) == 1:
        transposed = transpose(weight, 0, 1)
        return mm(x, transposed) if bias is None else addmm(bias, x, transposed)
    if bias is None:
        transposed = transpose(weight, 0, 1)
        return view(mm(reshape(x, rows, x.shape[-1]), transposed), *lead, width)
    if is_contiguous(x.shape, x.stride):
        flat = view(x, rows, x.shape[-1])
        return view(addmm(bias, flat, transpose(weight, 0, 1)), *lead, width)
    transposed = transpose(weight, 0, 1)
    out = view(mm(reshape(x, rows, x.shape[-1]), transposed), *lead, width)
    return add(out, bias) if x.tape.sum_out_of_place else add_(out, bias)  # ATen: shape-only tensors are not written to


def _operand_stride(shape: Shape, stride: Shape) -> Shape:
    """A gradient of a matrix comes column-major where the matrix is."""
    if stride[0] == 1 and stride[1] == shape[0] and shape[0] > 1:
        return stride
    return contiguous_stride(shape)


def _save_factors(node: Node, a: Tensor, b: Tensor, first: int = 0) -> None:
    """Keep each factor of a product that the gradient of the other needs; a is input number `first`, b the next."""
    if node.needs(first + 1):
        node.save(a)
    if node.needs(first):
        node.save(b)


def _product(tape: Tape, shape: Shape, dtype: DType, stride: Shape | None = None) -> Tensor:
    """What a multiplication by cuBLAS makes."""
    out = tape.empty(shape, dtype, stride)
    tape.multiplied.setdefault(tape.phase, tape.clock - 1)
    return out


def mm(a: Tensor, b: Tensor) -> Tensor:
    """a @ b of matrices: keeps each operand that the other's gradient needs; b's gradient comes first."""
    out = _product(a.tape, (a.shape[0], b.shape[1]), a.dtype)
    node = record(a.tape, out, _mm_backward, (a, b), (a.shape, a.stride, b.shape, b.stride))
    if node is not None:
        _save_factors(node, a, b)
    return out


def _mm_backward(node: Node, grads: Grads) -> list[Tensor | None]:
    (grad,) = grads
    if grad is None:
        return [None, None]
    a_shape, a_stride, b_shape, b_stride = node.context
    second = _product(node.tape, b_shape, grad.dtype, _operand_stride(b_shape, b_stride)) if node.needs(1) else None
    first = _product(node.tape, a_shape, grad.dtype, _operand_stride(a_shape, a_stride)) if node.needs(0) else None
    return [first, second]


def addmm(bias: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """bias + a @ b: like `mm`, but a's gradient comes first; the bias's is the incoming one, summed over rows."""
    out = _product(a.tape, (a.shape[0], b.shape[1]), a.dtype)
    node = record(a.tape, out, _addmm_backward, (bias, a, b), (a.shape, a.stride, b.shape, b.stride))
    if node is not None:
        _save_factors(node, a, b, first=1)
    return out


def _addmm_backward(node: Node, grads: Grads) -> list[Tensor | None]:
    (grad,) = grads
    if grad is None:
        return [None, None, None]
    a_shape, a_stride, b_shape, b_stride = node.context
    first = _product(node.tape, a_shape, grad.dtype, _operand_stride(a_shape, a_stride)) if node.needs(1) else None
    second = _product(node.tape, b_shape, grad.dtype, _operand_stride(b_shape, b_stride)) if node.needs(2) else None
    return [grad if node.needs(0) else None, first, second]


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """a @ b with broadcast batch dimensions (torch.matmul), through one bmm."""
    if a.tape.autocast is not None:
        b = cached_cast(b)
        a = cached_cast(a)
    if len(b.shape) == 2:
        lead = a.shape[:-1]
        if len(lead) == 1:
            return mm(a, b)
        return view(mm(reshape(a, prod(lead), a.shape[-1]), b), *lead, b.shape[1])
    batch = broadcast_shapes(a.shape[:-2], b.shape[:-2])
    count = prod(batch)
    left = reshape(expand(a, *batch, *a.shape[-2:]), count, *a.shape[-2:])
    right = reshape(expand(b, *batch, *b.shape[-2:]), count, *b.shape[-2:])
    return view(bmm(left, right), *batch, a.shape[-2], b.shape[-1])


def weight_matmul(weight: Tensor, x: Tensor) -> Tensor:
    """weight [out, in] @ x [b, in, s] where the weight is trained: folded into one mm, whose result is copied."""
    if x.tape.autocast is not None:
        x = cached_cast(x)
        weight = cached_cast(weight)
    columns, transposed = transpose(x, 1, 2), transpose(weight, 0, 1)
    batch, length, inner = columns.shape
    out = view(mm(reshape(columns, batch * length, inner), transposed), batch, length, weight.shape[0])
    return contiguous(transpose(out, 1, 2))


def bmm(a: Tensor, b: Tensor) -> Tensor:
    """Batched a @ b: keeps each operand that the other's gradient needs; b's gradient comes first."""
    if a.tape.autocast is not None:
        b = cached_cast(b)
        a = cached_cast(a)
    out = _product(a.tape, (a.shape[0], a.shape[1], b.shape[2]), a.dtype)
    node = record(a.tape, out, _bmm_backward, (a, b), (a.shape, b.shape))
    if node is not None:
        _save_factors(node, a, b)
    return out


def _bmm_backward(node: Node, grads: Grads) -> list[Tensor | None]:
    (grad,) = grads
    if grad is None:
        return [None, None]
    a_shape, b_shape = node.context
    second = _product(node.tape, b_shape, grad.dtype) if node.needs(1) else None
    first = _product(node.tape, a_shape, grad.dtype) if node.needs(0) else None
    return [first, second]


def grouped_mm(rows: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """Rows [n, in] sorted by group, each times its group's matrix of [groups, in, out]; `offsets` are where groups end.

    Autocast leaves it alone. Keeps rows, weight and offsets; the weight's gradient comes first.
    """
    out = rows.tape.empty((rows.shape[0], weight.shape[2]), rows.dtype)
    node = record(rows.tape, out, _grouped_mm_backward, (rows, weight), (rows.shape, weight.shape, weight.stride))
    if node is not None:
        _save_factors(node, rows, weight)
        node.save(offsets)
    return out


def _grouped_mm_backward(node: Node, grads: Grads) -> list[Tensor | None]:
    (grad,) = grads
    if grad is None:
        return [None, None]
    rows, shape, stride = node.context
    second = node.tape.empty(shape, grad.dtype, stride) if node.needs(1) else None
    first = node.tape.empty(rows, grad.dtype) if node.needs(0) else None
    return [first, second]


def baddbmm(bias: Tensor, a: Tensor, b: Tensor, *, scaled: bool = False) -> Tensor:
    """bias + batched a @ b (bloom's score with alibi): like `bmm`, but a's gradient comes first.

    The bias takes the incoming gradient. With `scaled` the product is multiplied by a number (`alpha`), and so is each
    of its gradients, into a new tensor.
    """
    if a.tape.autocast is not None:
        b = cached_cast(b)
        a = cached_cast(a)
        bias = cached_cast(bias)
    out = _product(a.tape, (a.shape[0], a.shape[1], b.shape[2]), a.dtype)
    node = record(a.tape, out, _baddbmm_backward, (bias, a, b), (a.shape, b.shape, scaled))
    if node is not None:
        _save_factors(node, a, b, first=1)
    return out


def _baddbmm_backward(node: Node, grads: Grads) -> list[Tensor | None]:
    (grad,) = grads
    if grad is None:
        return [None, None, None]
    *shapes, scaled = node.context
    out: list[Tensor | None] = [grad if node.needs(0) else None]
    for index, shape in enumerate(shapes, 1):
        made = _product(node.tape, shape, grad.dtype) if node.needs(index) else None
        if made is not None and scaled:
            made = node.tape.empty(shape, grad.dtype)
        out.append(made)
    return out


def solve_triangular(a: Tensor, b: Tensor) -> Tensor:
    """The solution x of a @ x = b for triangular a [..., n, n], laid out column by column: keeps a and x."""
    out = _by_columns(b)
    node = record(a.tape, out, _solve_backward, (a, b))
    if node is not None:
        node.save(a)
        node.save(out)
    return out


def _by_columns(x: Tensor) -> Tensor:
    rows, columns = x.shape[-2:]
    stride = contiguous_stride((*x.shape[:-2], columns, rows))
    return x.tape.empty(x.shape, x.dtype, (*stride[:-2], 1, rows))


def _solve_backward(node: Node, grads: Grads) -> list[Tensor | None]:
    (grad,) = grads
    if grad is None:
        return [None, None]
    of_b = _by_columns(grad)
    of_a = None
    if node.needs(0):
        of_a = grad.tape.empty((*grad.shape[:-1], grad.shape[-2]), grad.dtype)
        of_a = empty_like(of_a)
        of_a = empty_like(of_a)
    return [of_a, of_b if node.needs(1) else None]
