"""The backward of fused attention: its gradients, and what each kernel allocates to compute them.

Source: aten/src/ATen/native/transformers/cuda/attention_backward.cu of PyTorch 2.14.
"""

from __future__ import annotations

from collections.abc import Sequence

from memcalc.autograd.graph import Grads, Node
from memcalc.autograd.tape import Tape
from memcalc.autograd.tensor import Tensor, dense_stride, is_contiguous
from memcalc.common.sizes import Shape
from memcalc.ops.attention_kernels import Attention, cudnn_workspace, efficient_workspace, flash_rounded
from memcalc.tables.cuda_devices import CudaDevice
from memcalc.tables.dtypes import FP32, UINT8, DType


def heads_inside(shape: Shape) -> Shape:
    """Strides of [b, h, s, d] stored as (b, s, h, d)."""
    _, heads, length, dim = shape
    return (length * heads * dim, dim, heads * dim, 1)


def attention_backward(node: Node, grads: Grads) -> list[Tensor | None]:
    """Gradients of query, key and value, and of a bias where it is trained."""
    (grad,) = grads
    if grad is None:
        return [None] * len(node.edges)
    kernel, call, *layouts = node.context
    biases = [edge[2] for edge in node.edges[3:] if edge is not None]
    (shape, stride), *_ = layouts
    out_stride = dense_stride(shape, stride)
    return [*gradients(node.tape, kernel, call, layouts, (grad, out_stride), biases)]


def gradients(
    tape: Tape,
    kernel: str,
    call: Attention,
    layouts: Sequence[tuple[Shape, Shape]],
    output: tuple[Tensor, Shape],
    biases: Sequence[Shape] = (),
) -> list[Tensor]:
    """What a kernel's backward makes: gradients with the shapes and strides of `layouts`, then those of `biases`.

    `output` has the gradient of the kernel's output and the strides of the output itself.
    """
    grad, out_stride = output
    strides = (grad.stride, out_stride)
    copies = [] if tape.device is None or kernel != "flash" else _by_position(tape, call, grad.dtype, strides)
    out = [
        tape.empty(shape, grad.dtype, heads_inside(shape) if kernel == "efficient" else dense_stride(shape, stride))
        for shape, stride in layouts
    ]
    out.extend(_bias_gradient(tape, shape, grad.dtype) for shape in biases)
    if tape.device is not None:
        _backward_scratch(tape, call, kernel, tape.device)
    del copies
    return out


def _by_position(tape: Tape, call: Attention, dtype: DType, strides: Sequence[Shape]) -> list[Tensor]:
    """Flash takes the gradient and the output [b, s, h, d] contiguous, and copies them where they are not."""
    shape = (call.batch, call.heads, call.length, call.dim)
    return [
        tape.empty(shape, dtype)
        for stride in strides
        if not is_contiguous((shape[0], *shape[2:0:-1], shape[3]), (stride[0], *stride[2:0:-1], stride[3]))
    ]


def _backward_scratch(tape: Tape, call: Attention, kernel: str, device: CudaDevice) -> None:
    """Allocate and free what a kernel's backward works in: gradients of grouped heads one by one, and sums in fp32."""
    heads = (call.batch, call.key_length, call.heads)
    widths = (call.dim, call.value_dim) if call.heads != call.key_heads else ()
    if kernel == "cudnn":
        tape.empty((cudnn_workspace(call),), UINT8)
        return
    if kernel == "flash":
        rows = -(-call.length // 128) * 128
        sums = tape.empty((call.batch, call.heads, rows), FP32)
        queries = tape.empty((call.batch, rows, call.heads, flash_rounded(call)), FP32)
        expanded = [tape.empty((*heads, width), call.dtype) for width in widths]
        del sums, queries, expanded
        return
    expanded = [tape.empty((*heads, width), call.dtype) for width in widths]
    if call.dtype is FP32:
        product = tape.empty((call.batch, call.length, call.heads, call.value_dim), FP32)
        sums = tape.empty((call.batch, call.length, call.heads), FP32)
        by_position = sums
        if call.length > 1 and call.heads > 1:
            sums = tape.empty((call.batch, call.heads, call.length), FP32)
        del product, by_position
    else:
        sums = tape.empty((call.batch, call.heads, call.length), FP32)
    workspace = tape.empty((efficient_workspace(call, device),), UINT8)
    del sums, workspace, expanded


def _bias_gradient(tape: Tape, shape: Shape, dtype: DType) -> Tensor:
    """The gradient of a bias, whose rows the memory-efficient kernel writes at a multiple of sixteen."""
    wide = tape.empty((*shape[:-1], -(-shape[-1] // 16) * 16), dtype)
    return Tensor(shape, wide.stride, dtype, wide.storage)
