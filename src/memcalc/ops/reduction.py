"""Reductions: softmax, normalizations and sums. Under autocast they run in fp32.

Source of the saved tensors: tools/autograd/derivatives.yaml of PyTorch 2.14.
"""

from __future__ import annotations

from memcalc.autograd.graph import Backward, Grads, Node, record
from memcalc.autograd.tensor import Tensor, contiguous_stride, is_contiguous
from memcalc.common.sizes import Shape
from memcalc.ops.elementwise import empty_like, fp32_under_autocast, to
from memcalc.ops.embedding_backward import SORTED_ABOVE, sorted_embedding_gradient
from memcalc.ops.views import unsqueeze
from memcalc.tables.dtypes import BOOL, FP16, FP32, INT64, DType, promote


def _reduced(shape: Shape, dim: int, keepdim: bool) -> Shape:
    dim %= len(shape)
    return (*shape[:dim], 1, *shape[dim + 1 :]) if keepdim else (*shape[:dim], *shape[dim + 1 :])


def mean(x: Tensor, dim: int = -1, *, keepdim: bool = True) -> Tensor:
    """The mean over `dim`; its gradient is divided at full size."""
    out = x.tape.empty(_reduced(x.shape, dim, keepdim), x.dtype)
    x.tape.reduce(x, (dim % len(x.shape),))
    record(x.tape, out, _mean_backward, (x,), x.shape)
    return out


def _mean_backward(node: Node, grads: Grads) -> list[Tensor | None]:
    (grad,) = grads
    return [None if grad is None else node.tape.empty(node.context, grad.dtype)]


def std(x: Tensor) -> Tensor:
    """The standard deviation over the last dimension, which is kept: keeps x and the result."""
    out = x.tape.empty((*x.shape[:-1], 1), x.dtype)
    node = record(x.tape, out, _std_backward, (x,), x.shape)
    if node is not None:
        node.save(x)
        node.save(out)
    return out


def _std_backward(node: Node, grads: Grads) -> list[Tensor | None]:
    """The gradient of the variance, times twice the distance from the mean."""
    (grad,) = grads
    if grad is None:
        return [None]
    shape = node.context
    doubled, of_variance = empty_like(grad), empty_like(grad)
    zero = empty_like(grad, BOOL)
    del doubled, zero
    scaled = empty_like(grad)
    distance = node.tape.empty(shape, grad.dtype)
    mean = empty_like(grad)
    out = node.tape.empty(shape, grad.dtype)
    del mean, distance, scaled, of_variance
    return [out]


def sum(x: Tensor, dim: int = -1, *, keepdim: bool = False, dtype: DType | None = None) -> Tensor:
    """The sum over `dim`, in `dtype`, or in fp32 under autocast, without a copy of x.

    Its gradient is an expanded view, or a copy.
    """
    dtype = dtype or (x.dtype if x.tape.autocast is None or not x.dtype.floating else FP32)
    out = x.tape.empty(_reduced(x.shape, dim, keepdim), dtype)
    x.tape.reduce(x, (dim % len(x.shape),))
    record(x.tape, out, _sum_backward, (x,), (x.shape, x.dtype, dim % len(x.shape), keepdim))
    return out


def _sum_backward(node: Node, grads: Grads) -> list[Tensor | None]:
    (grad,) = grads
    if grad is None:
        return [None]
    shape, dtype, dim, keepdim = node.context
    wide = grad if keepdim else unsqueeze(grad, dim)
    stride = tuple(0 if index == dim else step for index, step in enumerate(wide.stride))
    return [to(Tensor(shape, stride, grad.dtype, grad.storage), dtype)]


def logsumexp(x: Tensor, dim: int = -1) -> Tensor:
    """log(sum(exp(x))) over `dim`: keeps x and the result; each way makes full-size tensors.

    Runs in fp32 under autocast.
    """
    tape, x = x.tape, fp32_under_autocast(x)
    dim %= len(x.shape)
    shape = (*x.shape[:dim], *x.shape[dim + 1 :])
    held: tuple[Tensor, ...] = ()
    if not tape.sum_out_of_place:  # on a GPU: the maxima, which of them are infinite, and exp(x - maxima)
        maxima = tape.empty(shape, x.dtype)
        infinite = tape.empty(shape, x.dtype), tape.empty(shape, BOOL)
        del infinite
        held = (maxima, empty_like(x))
        del maxima
    out = tape.empty(shape, x.dtype)
    del held
    node = record(tape, out, _logsumexp_backward, (x,), x.shape)
    if node is not None:
        node.save(x)
        node.save(out)
    return out


def _logsumexp_backward(node: Node, grads: Grads) -> list[Tensor | None]:
    (grad,) = grads
    if grad is None:
        return [None]
    difference = node.tape.empty(node.context, grad.dtype)
    exponential = node.tape.empty(node.context, grad.dtype)
    out = node.tape.empty(node.context, grad.dtype)
    del difference, exponential
    return [out]


def vector_norm(x: Tensor, *dims: int) -> Tensor:
    """The length of x along `dims` (its last), kept as dimensions of one: keeps x and itself. fp32 under autocast."""
    dtype = x.dtype if x.tape.autocast is None else FP32
    shape = x.shape
    for dim in dims or (-1,):
        shape = _reduced(shape, dim, True)
    out = x.tape.empty(shape, dtype)
    node = record(x.tape, out, _vector_norm_backward, (x,), (x.shape, x.dtype))
    if node is not None:
        node.save(x)
        node.save(out)
    return out


def _vector_norm_backward(node: Node, grads: Grads) -> list[Tensor | None]:
    (grad,) = grads
    if grad is None:
        return [None]
    shape, dtype = node.context
    scaled = node.tape.empty(shape, promote(dtype, grad.dtype))  # x / length, and 0 where that is 0
    zero = empty_like(grad, BOOL)
    out = empty_like(scaled)
    del zero, scaled
    return [out]


def softmax(x: Tensor, dtype: DType | None = None) -> Tensor:
    """Softmax keeps its output. `dtype` casts the input first, except fp16 to fp32, which the kernel does itself."""
    return _softmax(x, dtype, _softmax_backward)


def log_softmax(x: Tensor, dtype: DType | None = None) -> Tensor:
    """Log-softmax keeps its output."""
    return _softmax(x, dtype, _log_softmax_backward)


def _softmax(x: Tensor, dtype: DType | None, backward: Backward) -> Tensor:
    if dtype is None and x.tape.autocast is not None and x.dtype.floating:
        dtype = FP32
    fused = x.dtype is FP16 and dtype is FP32
    if dtype is not None and not fused:
        x = to(x, dtype)
    out = x.tape.empty(x.shape, dtype or x.dtype, contiguous_stride(x.shape))
    node = record(x.tape, out, backward, (x,), x.dtype)
    if node is not None:
        node.save(out)
    return out


def _softmax_backward(node: Node, grads: Grads) -> list[Tensor | None]:
    (out,) = _log_softmax_backward(node, grads)
    if out is not None and node.tape.device is not None:
        node.tape.empty(out.shape, grads[0].dtype)  # type: ignore[union-attr]  # the kernel takes gradient x output
    return [out]


def _log_softmax_backward(node: Node, grads: Grads) -> list[Tensor | None]:
    (grad,) = grads
    return [None if grad is None else node.tape.empty(grad.shape, node.context)]


def _row_by_row(x: Tensor) -> Tensor | None:
    """The copy that kernels of norms make of an operand whose rows do not follow each other; None for others.

    Source: aten/src/ATen/native/cuda/layer_norm_kernel.cu (expect_contiguous).
    """
    if x.tape.device is None or is_contiguous(x.shape, x.stride):
        return None
    return x.tape.empty(x.shape, x.dtype)


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, normalized: int = 1) -> Tensor:
    """The fused LayerNorm keeps its operands, and mean and reciprocal deviation in fp32."""
    x = fp32_under_autocast(x)
    weight = None if weight is None else fp32_under_autocast(weight)
    bias = None if bias is None else fp32_under_autocast(bias)
    tape = x.tape
    copied = _row_by_row(x)
    out = tape.empty(x.shape, x.dtype)
    rows = (*x.shape[:-normalized], *(1,) * normalized)
    mean_, rstd = tape.empty(rows, FP32), tape.empty(rows, FP32)
    del copied
    node = record(tape, out, _layer_norm_backward, (x, weight, bias), x.stride)
    if node is not None:
        for tensor in (bias, x, weight, mean_, rstd):
            if tensor is not None:
                node.save(tensor)
    return out


def _layer_norm_backward(node: Node, grads: Grads) -> list[Tensor | None]:
    (grad,) = grads
    if grad is None:
        return [None, None, None]
    out: list[Tensor | None] = [None] * len(node.edges)
    copied = [_row_by_row(grad), _row_by_row(Tensor(grad.shape, node.context, grad.dtype, grad.storage))]
    for index, edge in enumerate(node.edges):
        if edge is not None:
            out[index] = node.tape.empty(edge[2], edge[3])
    del copied
    return out


def rms_norm(x: Tensor, weight: Tensor | None) -> Tensor:
    """torch.nn.functional.rms_norm: keeps its input and the reciprocal root in fp32. Runs in fp32 under autocast."""
    x = fp32_under_autocast(x)
    weight = None if weight is None else fp32_under_autocast(weight)
    tape = x.tape
    copied = _row_by_row(x)
    out = tape.empty(x.shape, x.dtype)
    rstd = tape.empty((*x.shape[:-1], 1), FP32)
    del copied
    node = record(tape, out, _layer_norm_backward, (x, weight, None), x.stride)
    if node is not None:
        node.save(x)
        if weight is not None:
            node.save(weight)
        node.save(rstd)
    return out


def embedding(ids: Tensor, weight: Tensor) -> Tensor:
    """Rows of `weight`: keeps the indices; the gradient is as large as the table."""
    out = weight.tape.empty((*ids.shape, weight.shape[1]), weight.dtype)
    node = record(weight.tape, out, _embedding_backward, (weight,), ids.numel)
    if node is not None:
        node.save(ids)
    return out


def embedding_bag(ids: Tensor, weight: Tensor, shares: Tensor) -> Tensor:
    """Sums [n, h] of rows of `weight` by ids [n, k], times `shares` [n, k]: keeps these and where each bag begins."""
    tape, (count, size) = weight.tape, ids.shape
    starts = tape.empty((count,), INT64)
    out = tape.empty((count, weight.shape[1]), weight.dtype)
    bags, sizes = tape.empty((count * size,), INT64), tape.empty((count,), INT64)
    node = record(tape, out, _embedding_backward, (weight,), 0)
    if node is not None:
        for kept in (ids, starts, shares, bags, sizes):
            node.save(kept)
    return out


def _embedding_backward(node: Node, grads: Grads) -> list[Tensor | None]:
    (grad,) = grads
    edge, tape, ids = node.edges[0], node.tape, node.context
    if grad is None or edge is None:
        return [None]
    if tape.device is not None and ids > SORTED_ABOVE:
        return [sorted_embedding_gradient(tape, tape.device, ids, grad, edge[2])]
    return [tape.empty(edge[2], grad.dtype)]
