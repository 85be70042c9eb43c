"""Manifold-constrained hyper-connections: several residual streams, mixed around every sublayer (DeepSeek-V4)."""

from __future__ import annotations

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.nn.module import Module, Parameter
from memcalc.tables.dtypes import FP32


class Fp32RMSNorm(Module):
    """An RMSNorm whose weight is in fp32, whatever the model's dtype, and multiplies there."""

    scope = "norms"

    def __init__(self, width: int) -> None:
        self.weight = Parameter(width, dtype=FP32, group="norms")

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., width] to [..., width]."""
        dtype = hidden.dtype
        hidden = ops.to(hidden, FP32)
        variance = ops.mean(ops.pow(hidden))
        hidden = ops.mul(hidden, ops.rsqrt(ops.add_scalar(variance)))
        return ops.to(ops.mul(self.weight, hidden), dtype)


def unweighted_rms_norm(x: Tensor) -> Tensor:
    """x over its root mean square, which is computed in fp32 and cast back."""
    with x.tape.scoped("norms"):
        return ops.mul(x, ops.to(ops.rsqrt(ops.add_scalar(ops.mean(ops.pow(ops.to(x, FP32))))), x.dtype))


class HyperConnection(Module):
    """Collapses `streams` residual streams into a sublayer's input, and says how to mix its output back.

    iterations: of the Sinkhorn algorithm, which makes rows and columns of the mixing matrix sum to one.
    """

    scope = "residual stream"

    def __init__(self, hidden: int, streams: int, iterations: int) -> None:
        self.streams, self.iterations = streams, iterations
        self.fn = Parameter((2 + streams) * streams, streams * hidden, dtype=FP32, group="other")
        self.base = Parameter((2 + streams) * streams, dtype=FP32, group="other")
        self.scale = Parameter(3, dtype=FP32, group="other")

    def forward(self, states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Streams [b, s, n, h] to weights [b, s, n] and [b, s, n, n], and the sublayer's input [b, s, h]."""
        count = self.streams
        sizes = [count, count, count * count]
        flattened = ops.to(ops.view(states, *states.shape[:2], -1), FP32)
        flattened = unweighted_rms_norm(flattened)
        flattened = ops.linear(flattened, self.fn)
        pre_w, post_w, comb_w = ops.split(flattened, sizes, -1)
        pre_b, post_b, comb_b = ops.split(self.base, sizes, -1)
        pre_scale, post_scale, comb_scale = ops.unbind(self.scale, 0)
        comb_w = ops.view(comb_w, *comb_w.shape[:-1], count, count)
        comb_b = ops.view(comb_b, count, count)
        pre = ops.add_scalar(ops.sigmoid(ops.add(ops.mul(pre_w, pre_scale), pre_b)))
        post = ops.mul_scalar(ops.sigmoid(ops.add(ops.mul(post_w, post_scale), post_b)))
        comb = ops.add_scalar(ops.softmax(ops.add(ops.mul(comb_w, comb_scale), comb_b)))
        comb = _divided(comb, -2)
        for _ in range(self.iterations - 1):
            comb = _divided(comb, -1)
            comb = _divided(comb, -2)
        collapsed = ops.to(ops.sum(ops.mul(ops.unsqueeze(pre, -1), states), 2), states.dtype)
        return post, comb, collapsed


def _divided(x: Tensor, dim: int) -> Tensor:
    return ops.div(x, ops.add_scalar(ops.sum(x, dim, keepdim=True)))


def mixed_back(post: Tensor, comb: Tensor, out: Tensor, states: Tensor) -> Tensor:
    """A sublayer's output [b, s, h] spread over the streams, plus the streams [b, s, n, h] mixed."""
    dtype = states.dtype
    spread = ops.mul(ops.unsqueeze(ops.to(post, dtype), -1), ops.unsqueeze(out, -2))
    return ops.add(spread, ops.matmul(ops.transpose(ops.to(comb, dtype), -1, -2), states))


class HyperHead(Module):
    """Collapses the streams after the last block."""

    scope = "residual stream"

    def __init__(self, hidden: int, streams: int) -> None:
        self.hc_fn = Parameter(streams, streams * hidden, dtype=FP32, group="other")
        self.hc_base = Parameter(streams, dtype=FP32, group="other")
        self.hc_scale = Parameter(1, dtype=FP32, group="other")

    def forward(self, states: Tensor) -> Tensor:
        """Streams [b, s, n, h] to [b, s, h]."""
        flat = unweighted_rms_norm(ops.to(ops.view(states, *states.shape[:2], -1), FP32))
        mixes = ops.linear(flat, self.hc_fn)
        pre = ops.add_scalar(ops.sigmoid(ops.add(ops.mul(mixes, self.hc_scale), self.hc_base)))
        return ops.to(ops.sum(ops.mul(ops.unsqueeze(pre, -1), states), 2), states.dtype)
