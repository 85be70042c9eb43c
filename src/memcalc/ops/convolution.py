"""Convolution: a matrix multiplication in disguise. Keeps its input and its weight."""

from __future__ import annotations

from memcalc.autograd.graph import Grads, Node, record
from memcalc.autograd.tensor import Tensor, contiguous_stride, dense_stride, is_contiguous
from memcalc.common.sizes import Shape
from memcalc.ops.elementwise import fp32_under_autocast
from memcalc.ops.matmul import cached_cast
from memcalc.ops.split_cat import memory_format_like
from memcalc.tables.dtypes import INT64


def convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    stride: int | tuple[int, ...] = 1,
    padding: int | tuple[int, ...] = 0,
) -> Tensor:
    """Convolution of x [b, c, *sizes] with weight [out, c / groups, *widths]: [b, out, *sizes'].

    Keeps x and weight; backward makes the gradients of x, weight and bias at once. A patch embedding strides as far as
    it is wide. `stride` and `padding` may be one for each of the sizes. Channels that lie innermost stay there, in all
    gradients too.
    """
    if x.tape.autocast is not None:
        bias = None if bias is None else cached_cast(bias)
        weight = cached_cast(weight)
        x = cached_cast(x)
    steps, zeros = ((n,) * (len(x.shape) - 2) if isinstance(n, int) else n for n in (stride, padding))
    sizes = zip(x.shape[2:], weight.shape[2:], steps, zeros, strict=True)
    spatial = tuple((size + 2 * more - width) // step + 1 for size, width, step, more in sizes)
    shape = (x.shape[0], weight.shape[0], *spatial)
    # The kernel for one channel at a time over time makes everything contiguous.
    depthwise = len(shape) == 3 and weight.shape[1] == 1
    layout = x.shape, contiguous_stride(x.shape) if depthwise else x.stride
    copies = depthwise and x.tape.device is not None and not is_contiguous(x.shape, x.stride)
    copied = x.tape.empty(x.shape, x.dtype) if copies else None
    out = x.tape.empty(shape, x.dtype, memory_format_like(shape, [layout]))
    del copied
    node = record(x.tape, out, _convolution_backward, (x, weight, bias), (*layout, copies))
    if node is not None:
        node.save(x)
        node.save(weight)
    return out


def _convolution_backward(node: Node, grads: Grads) -> list[Tensor | None]:
    (grad,) = grads
    if grad is None:
        return [None, None, None]
    shape, stride, copies = node.context
    weight = node.edges[1]
    copied = [node.tape.empty(shape, grad.dtype)] if copies else []
    if node.tape.device is not None and _lies_otherwise(grad, shape, stride):
        copied.append(node.tape.empty(grad.shape, grad.dtype))  # cuDNN wants it as the input lies
    of_weight = None if weight is None else memory_format_like(weight[2], [(shape, stride)])
    layouts = (dense_stride(shape, stride), of_weight)
    made = [
        None if edge is None else node.tape.empty(edge[2], grad.dtype, layout)
        for edge, layout in zip(node.edges[:2], layouts, strict=True)
    ]
    copied.clear()
    bias = node.edges[2]
    made.append(None if bias is None else node.tape.empty(bias[2], grad.dtype))
    if bias is not None:  # its gradient is a sum
        node.tape.reduce(grad, (0, *range(2, len(grad.shape))))
    return made


def _lies_otherwise(grad: Tensor, shape: Shape, stride: Shape) -> bool:
    """Whether a gradient is no dense tensor in the memory format that the input [shape, stride] suggests.

    Source: `cudnn_convolution_backward` in aten/src/ATen/native/cudnn/ConvShared.cpp, PyTorch 2.14.
    """
    wanted = memory_format_like(grad.shape, [(shape, stride)])
    return any(size > 1 and a != b for size, a, b in zip(grad.shape, grad.stride, wanted, strict=True))


def avg_pool2d(x: Tensor, kernel: int, rows: int | None = None) -> Tensor:
    """The mean of squares of `kernel` by `kernel`, or of `rows` by `kernel`, of x [b, c, height, width]: keeps x."""
    out = x.tape.empty((*x.shape[:2], x.shape[2] // (rows or kernel), x.shape[3] // kernel), x.dtype)
    node = record(x.tape, out, _full_backward, (x,), x.shape)
    if node is not None:
        node.save(x)
    return out


def _full_backward(node: Node, grads: Grads) -> list[Tensor | None]:
    (grad,) = grads
    return [None if grad is None else node.tape.empty(node.context, grad.dtype)]


def grid_sample(x: Tensor, places: Tensor) -> Tensor:
    """x [b, c, height, width] interpolated at places [b, rows, columns, 2]: keeps both.

    Backward makes a gradient of the places too, whether it is needed or not.
    """
    out = x.tape.empty((*x.shape[:2], *places.shape[1:3]), x.dtype)
    node = record(x.tape, out, _grid_sample_backward, (x,), (x.shape, places.shape))
    if node is not None:
        node.save(x)
        node.save(places)
    return out


def _grid_sample_backward(node: Node, grads: Grads) -> list[Tensor | None]:
    (grad,) = grads
    if grad is None:
        return [None]
    shape, places = node.context
    out = node.tape.empty(shape, grad.dtype)
    of_places = node.tape.empty(places, grad.dtype)
    del of_places
    return [out]


def max_pool2d(x: Tensor, kernel: int, stride: int, padding: int) -> Tensor:
    """The largest element of squares of x [b, c, height, width]: keeps x, and where each was found."""
    sizes = tuple((size + 2 * padding - kernel) // stride + 1 for size in x.shape[2:])
    shape = (*x.shape[:2], *sizes)
    out = x.tape.empty(shape, x.dtype, memory_format_like(shape, [(x.shape, x.stride)]))
    found = x.tape.empty(shape, INT64)
    node = record(x.tape, out, _full_backward, (x,), x.shape)
    if node is not None:
        node.save(x)
        node.save(found)
    return out


def unfold(x: Tensor, side: int) -> Tensor:
    """Squares of `side` by `side` of x [b, c, height, width] as columns, a copy: [b, c · side², squares]."""
    batch, channels, height, width = x.shape
    out = x.tape.empty((batch, channels * side**2, (height // side) * (width // side)), x.dtype)
    record(x.tape, out, _full_backward, (x,), x.shape)
    return out


def interpolate(x: Tensor, sizes: tuple[int, int]) -> Tensor:
    """x [b, c, height, width] resampled to these sizes, in fp32 under autocast: keeps nothing.

    Channels that lie innermost stay there.
    """
    x = fp32_under_autocast(x)
    shape = (*x.shape[:2], *sizes)
    out = x.tape.empty(shape, x.dtype, memory_format_like(shape, [(x.shape, x.stride)]))
    record(x.tape, out, _interpolate_backward, (x,), x.shape)
    return out


def _interpolate_backward(node: Node, grads: Grads) -> list[Tensor | None]:
    (grad,) = grads
    return [
        None
        if grad is None
        else node.tape.empty(node.context, grad.dtype, memory_format_like(node.context, [(grad.shape, grad.stride)]))
    ]


def conv1d(x: Tensor, weight: Tensor, bias: Tensor | None, padding: int) -> Tensor:
    """Convolution of x [b, c, s] with weight [out, c / groups, width] and step one: [b, out, s + 2·padding - w + 1]."""
    return convolution(x, weight, bias, padding=padding)


def upsample_nearest(x: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """x [b, c, *sizes before] with its nearest neighbours at these sizes: keeps nothing, in x's own dtype."""
    shape = (*x.shape[:2], *sizes)
    out = x.tape.empty(shape, x.dtype, memory_format_like(shape, [(x.shape, x.stride)]))
    record(x.tape, out, _interpolate_backward, (x,), x.shape)
    return out
