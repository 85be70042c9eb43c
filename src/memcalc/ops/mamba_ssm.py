"""Fused kernels of mamba-ssm and causal-conv1d: whole mixers as one function that keeps little and computes it again.

Sources: mamba_ssm 2.2, ops/selective_scan_interface.py (MambaInnerFn, checkpoint_lvl 1) and ops/triton/ssd_combined.py
(MambaSplitConv1dScanCombinedFn). Read, not measured: the packages need a GPU to be built.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from memcalc.autograd.graph import Grads, Node, record
from memcalc.autograd.tensor import Tensor
from memcalc.ops.views import contiguous
from memcalc.tables.dtypes import FP32

SCAN_CHUNK = 2048
"""Steps between two states that the selective scan keeps."""


@dataclass(frozen=True)
class InnerWeights:
    """The weights of a Mamba 1 mixer after its first projection, as the kernel takes them."""

    conv: Tensor
    conv_bias: Tensor | None
    x_proj: Tensor
    dt_proj: Tensor
    out_proj: Tensor
    a: Tensor
    d: Tensor
    dt_bias: Tensor

    def inputs(self) -> tuple[Tensor | None, ...]:
        """All of them, in order."""
        return (self.conv, self.conv_bias, self.x_proj, self.dt_proj, self.out_proj, self.a, self.d, self.dt_bias)


def mamba_inner(projected: Tensor, weights: InnerWeights) -> Tensor:
    """Projected inputs and gate [b, 2i, s] through convolution, scan and output to [b, s, h].

    Keeps the contiguous input, the projection to steps, b and c, the scan's output and its states at chunk ends.
    """
    tape, dtype = projected.tape, projected.dtype
    batch, twice, length = projected.shape
    inner, state = twice // 2, weights.a.shape[-1]
    source = contiguous(projected.detach())
    rows = tape.empty((batch, inner, length), dtype)  # the convolution's output, and its rows for the projection
    copy = tape.empty((batch * length, inner), dtype)
    small = tape.empty((batch * length, weights.x_proj.shape[0]), dtype)
    del copy
    delta = tape.empty((inner, batch * length), dtype)
    b, c = (tape.empty((batch, 1, state, length), dtype) for _ in range(2))
    out = tape.empty((batch, inner, length), dtype)
    chunks = -(-length // SCAN_CHUNK)
    states = tape.empty((batch, inner, chunks, 2 * state), FP32)
    gated = tape.empty((batch, inner, length), dtype)
    del rows, delta
    turned = tape.empty((batch, length, inner), dtype)
    result = tape.empty((batch, length, weights.out_proj.shape[0]), dtype)
    del gated, turned
    node = record(tape, result, _mamba_inner_backward, (projected, *weights.inputs()), (projected.shape, weights))
    if node is not None:
        for kept in (source, small, b, c, out, states, weights.a, weights.d, weights.dt_bias):
            node.save(kept)
    return result


def _mamba_inner_backward(node: Node, grads: Grads) -> list[Tensor | None]:
    (grad,) = grads
    (batch, twice, length), weights = node.context
    found: list[Tensor | None] = [None] * 9
    if grad is None:
        return found
    tape, dtype = node.tape, grad.dtype
    inner, state, flat = twice // 2, weights.a.shape[-1], batch * length
    convolved = tape.empty((batch, inner, length), dtype)
    delta = tape.empty((inner, flat), dtype)
    found[0] = tape.empty((batch, twice, length), dtype)
    turned = tape.empty((grad.shape[-1], flat), dtype)
    scanned = tape.empty((inner, flat), dtype)
    d_convolved, d_delta = (tape.empty((batch, inner, length), dtype) for _ in range(2))
    d_bc = [tape.empty((batch, 1, state, length), FP32) for _ in range(2)]
    gated = tape.empty((batch, inner, length), dtype)
    found[5] = _weight_gradient(node, 5, weights.out_proj)
    del gated, scanned, turned
    d_small = tape.empty((flat, weights.x_proj.shape[0]), dtype)
    rows = tape.empty((inner, flat), dtype)
    found[3] = _weight_gradient(node, 3, weights.x_proj)
    del rows, convolved, delta, d_bc
    rows = tape.empty((inner, flat), dtype)
    found[4] = _weight_gradient(node, 4, weights.dt_proj)
    summed = tape.empty((inner, flat), dtype)
    del rows, d_small, d_delta, d_convolved, summed
    for index, weight in ((1, weights.conv), (2, weights.conv_bias), (6, weights.a), (7, weights.d)):
        found[index] = None if weight is None else _weight_gradient(node, index, weight)
    found[8] = _weight_gradient(node, 8, weights.dt_bias)
    return found


def _weight_gradient(node: Node, index: int, weight: Tensor) -> Tensor | None:
    if not node.needs(index):
        return None
    return node.tape.empty(weight.shape, weight.dtype)


class CombinedShape(NamedTuple):
    """Sizes of a Mamba 2 mixer: see `Mamba2Shape`."""

    heads: int
    head_dim: int
    state: int
    groups: int
    chunk: int

    @property
    def inner(self) -> int:
        """Width of the inner states."""
        return self.heads * self.head_dim


def mamba_combined(
    projected: Tensor, shape: CombinedShape, weights: tuple[Tensor | None, ...], out_proj: Tensor, *, normed: bool
) -> Tensor:
    """Gate, inputs, b, c and steps [b, s, ...] through convolution, scan, gated norm and output to [b, s, h].

    `weights` are all that get gradients besides. Keeps the input and the scan's output, and one statistic a row.
    """
    tape, dtype = projected.tape, projected.dtype
    batch, length, _ = projected.shape
    convolved = tape.empty((batch, length, shape.inner + 2 * shape.groups * shape.state), dtype)
    scratch = _scan_scratch(projected, shape)
    out = tape.empty((batch, length, shape.inner), dtype)
    gated = None if normed else tape.empty((batch, length, shape.inner), dtype)
    del scratch, convolved
    rstd = tape.empty((shape.groups, batch * length), FP32) if normed else None
    normalised = tape.empty((batch * length, shape.inner), dtype) if normed else gated
    result = tape.empty((batch, length, out_proj.shape[0]), dtype)
    del normalised, gated
    inputs = (projected, out_proj, *weights)
    node = record(tape, result, _mamba_combined_backward, inputs, (projected.shape, shape, out_proj, weights, normed))
    if node is not None:
        for kept in (projected, out, *(() if rstd is None else (rstd,))):
            node.save(kept)
    return result


def _scan_scratch(like: Tensor, shape: CombinedShape) -> list[Tensor]:
    """What the chunked scan makes: sums of steps, states of chunks in fp32 and as they pass on, products inside."""
    tape, (batch, length, _) = like.tape, like.shape
    chunks = -(-length // shape.chunk)
    states = (batch, chunks, shape.heads, shape.head_dim, shape.state)
    return [
        tape.empty((batch, shape.heads, chunks, shape.chunk), FP32),
        tape.empty((batch, shape.heads, chunks, shape.chunk), FP32),
        tape.empty(states, FP32),
        tape.empty(states, like.dtype),
        tape.empty((batch, chunks, shape.groups, shape.chunk, shape.chunk), FP32),
    ]


def _mamba_combined_backward(node: Node, grads: Grads) -> list[Tensor | None]:
    (grad,) = grads
    dims, shape, out_proj, weights, normed = node.context
    found: list[Tensor | None] = [None] * (2 + len(weights))
    if grad is None:
        return found
    tape, dtype = node.tape, grad.dtype
    batch, length, _ = dims
    convolved = tape.empty((batch, length, shape.inner + 2 * shape.groups * shape.state), dtype)
    incoming = found[0] = tape.empty(dims, dtype)
    passed = tape.empty((batch, length, shape.inner), dtype)
    again = tape.empty((batch * length, shape.inner), dtype) if normed else None
    before = tape.empty((batch, length, shape.inner), dtype) if normed else None
    found[1] = _weight_gradient(node, 1, out_proj)
    del again, passed
    scratch = _scan_scratch(incoming, shape)
    chunks = -(-length // shape.chunk)
    d_states = tape.empty((batch, chunks, shape.heads, shape.head_dim, shape.state), FP32)
    d_inner = tape.empty((batch, length, shape.inner), dtype)
    d_bc = [tape.empty((batch, length, shape.groups, shape.state), FP32) for _ in range(2)]
    del scratch, d_states, d_inner, d_bc, convolved, before
    for index, weight in enumerate(weights, start=2):
        found[index] = None if weight is None else _weight_gradient(node, index, weight)
    return found
