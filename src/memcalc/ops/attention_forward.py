"""The forward of fused attention: what each kernel returns, and what it allocates for the time that it runs.

Source: aten/src/ATen/native/transformers/cuda/attention.cu of PyTorch 2.14.
"""

from __future__ import annotations

from collections.abc import Iterator

from memcalc.autograd.tape import Tape
from memcalc.autograd.tensor import Tensor, dense_stride
from memcalc.common.sizes import Shape
from memcalc.ops.attention_backward import heads_inside
from memcalc.ops.attention_kernels import Attention, efficient_output_accumulator, flash_rounded, flash_splits
from memcalc.tables.cuda_devices import CudaDevice
from memcalc.tables.dtypes import FP32, INT64


def forward_kernel(query: Tensor, call: Attention, kernel: str) -> tuple[Tensor, Tensor, list[Tensor]]:
    """What a kernel returns: the output, laid out as `query` is; the log-sum-exp; and the random state."""
    tape = query.tape
    random = [] if kernel == "flash" else _random_state(tape, call, kernel)
    shape = (call.batch, call.heads, call.length, call.value_dim)
    out = tape.empty(shape, query.dtype, heads_inside(shape) if kernel == "efficient" else _matching(shape, query))
    rows = call.length
    if kernel == "efficient":
        rows = -(-rows // 32) * 32 if call.needs_grad else 0
    if kernel == "cudnn" and tape.device is not None and not call.needs_grad:
        rows = 0  # PyTorch's trackers make one all the same
    lse = tape.empty((call.batch, call.heads, rows, 1), FP32)
    scratch = [] if tape.device is None else list(_forward_scratch(tape, call, kernel, tape.device))
    random = random or _random_state(tape, call, kernel)
    del scratch
    return out, lse, random


def _forward_scratch(tape: Tape, call: Attention, kernel: str, device: CudaDevice) -> Iterator[Tensor]:
    """What a kernel allocates for the time that it runs."""
    if kernel == "flash" and (splits := flash_splits(call, device)) > 1:
        parts = (splits, call.batch, call.heads, call.length)
        yield tape.empty(parts, FP32)
        yield tape.empty((*parts, flash_rounded(call)), FP32)
    if kernel == "efficient" and (nbytes := efficient_output_accumulator(call)):
        yield tape.empty((nbytes // 4,), FP32)


def _random_state(tape: Tape, call: Attention, kernel: str) -> list[Tensor]:
    """Seed and offset: flash keeps them as [2] and a scalar, the others as two scalars.

    With dropout the memory-efficient kernel has them on the CPU.
    """
    if kernel != "flash":
        on_cpu = kernel == "efficient" and call.dropout and tape.device is not None
        return [] if on_cpu else [tape.empty((), INT64), tape.empty((), INT64)]
    seed, offset = tape.empty((2,), INT64), tape.empty((), INT64)
    if call.dropout and tape.device is not None:
        seed = tape.empty((2,), INT64)
    return [seed, offset]


def _matching(shape: Shape, query: Tensor) -> Shape:
    """Strides of the output that cuDNN and flash lay out as the query is laid out."""
    return dense_stride(shape, query.stride) if shape == query.shape else _reordered(shape, query)


def _reordered(shape: Shape, query: Tensor) -> Shape:
    order = sorted(range(4), key=lambda dim: (query.stride[dim], -dim))
    out, step = [0] * 4, 1
    for dim in order:
        out[dim] = step
        step *= shape[dim]
    return tuple(out)


def layouts(*tensors: Tensor) -> tuple[tuple[Shape, Shape], ...]:
    """Shape and strides of each tensor."""
    return tuple((tensor.shape, tensor.stride) for tensor in tensors)
