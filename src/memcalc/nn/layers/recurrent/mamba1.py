"""The mixer of Mamba 1 in plain PyTorch: a selective scan that goes token by token."""

from __future__ import annotations

from collections.abc import Callable

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.common.assumption import Assumption
from memcalc.errors import UsageError
from memcalc.nn.layers.linear import Linear
from memcalc.nn.layers.masks import RECURRENT
from memcalc.nn.layers.mlp import activation
from memcalc.nn.layers.recurrent.causal_conv import CausalConv
from memcalc.nn.layers.recurrent.mamba2 import STATE
from memcalc.nn.layers.recurrent.ssd_scan import NO_PACKED_KERNELS, SCAN_NOTE, masked
from memcalc.nn.layers.recurrent.token_loop import token_steps
from memcalc.nn.module import Buffer, Module, Parameter
from memcalc.nn.run_context import run_context
from memcalc.nn.state_space_kernels import StateSpaceMixer
from memcalc.tables.dtypes import FP32


class WeightlessNorm(Module):
    """Falcon Mamba's norm inside the mixer: in fp32, with a buffer of ones that nothing reads."""

    scope = "norms"

    def __init__(self, width: int) -> None:
        self.weight = Buffer(width, dtype=None, group="norms")

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] to [..., width]."""
        return ops.to(_divided(ops.to(x, FP32)), x.dtype)


def _divided(x: Tensor) -> Tensor:
    return ops.mul(x, ops.rsqrt(ops.add_scalar(ops.mean(ops.pow(x)))))


def selective_scan(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, gate: Tensor, bias: Tensor
) -> tuple[Tensor, Tensor]:
    """Inputs x and steps dt [b, i, s], a [i, n], b and c [b, n, s]: output [b, i, s] and last state [b, i, n]."""
    batch, inner, length = x.shape
    dtype = x.dtype
    dt = ops.add(dt, ops.unsqueeze(ops.to(bias, dt.dtype), -1))
    dt = ops.softplus(dt)
    b = ops.transpose(b, 1, 2)
    c = ops.transpose(c, 1, 2)
    decay = ops.exp(ops.mul(ops.unsqueeze(ops.unsqueeze(a, 0), 2), ops.unsqueeze(dt, -1)))
    weight = ops.mul(ops.unsqueeze(dt, -1), ops.to(ops.unsqueeze(b, 1), FP32))
    added = ops.mul(weight, ops.to(ops.unsqueeze(x, -1), FP32))
    state = x.tape.empty((batch, inner, a.shape[-1]), dtype)
    outs: list[Tensor] = []
    for count in token_steps(x.tape, length):
        state = ops.add(ops.mul(ops.select(decay, 2), state), ops.select(added, 2))
        out = ops.matmul(ops.to(state, dtype), ops.unsqueeze(ops.select(c, 1), -1))
        out = ops.select(out, 2)
        outs.append(ops.as_many(ops.unsqueeze(out, -1), -1, count))
    out = ops.cat(outs, -1)  # torch.stack of them
    out = ops.add(out, ops.mul(x, ops.unsqueeze(ops.unsqueeze(d, 0), -1)))
    out = ops.mul(out, ops.silu(gate))
    return out, state


def state_update(
    state: Tensor, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, gate: Tensor, bias: Tensor
) -> Tensor:
    """One token: `state` [b, i, n] moves on in place; x, dt and gate [b, i], b and c [b, n]."""
    dtype = x.dtype
    dt = ops.add(dt, ops.to(bias, dt.dtype))
    dt = ops.softplus(dt)
    decay = ops.exp(ops.mul(ops.unsqueeze(ops.to(dt, FP32), -1), ops.to(a, FP32)))
    weight = ops.mul(ops.unsqueeze(ops.to(dt, FP32), -1), ops.unsqueeze(ops.to(b, FP32), 1))
    added = ops.mul(weight, ops.unsqueeze(ops.to(x, FP32), -1))
    moved = ops.add(ops.mul(ops.to(state, FP32), decay), added)
    written = ops.to(moved, state.dtype)
    del written
    out = ops.squeeze(ops.matmul(ops.to(moved, c.dtype), ops.unsqueeze(c, -1)), -1)
    out = ops.add(out, ops.mul(x, d))
    out = ops.mul(out, ops.silu(gate))
    return ops.to(out, dtype)


class MambaMixer(StateSpaceMixer):
    """Mamba 1: one projection to inputs and gate, a causal convolution, the scan, the output projection.

    hidden, inner: width of the model and of the mixer.
    state: size of the state of each channel.
    rank: rank of the step projection.
    kernel: width of the convolution.
    act: activation after the convolution.
    conv_bias, bias: biases of the convolution and of the projections.
    norms: makes norms over steps, b and c (Jamba, Falcon Mamba).
    fused_first: in training, fp32 copies of two vectors are made for a fused kernel that is not installed.
    """

    scope = "state-space mixer"
    window = RECURRENT
    assumption: Assumption | None = SCAN_NOTE

    def __init__(
        self,
        hidden: int,
        inner: int,
        state: int,
        rank: int,
        kernel: int,
        act: str,
        *,
        conv_bias: bool = True,
        bias: bool = False,
        norms: Callable[[], list[Module]] | None = None,
        fused_first: bool = True,
    ) -> None:
        self.widths = [rank, state, state]
        self.fused_first = fused_first
        self.A_log = Parameter(inner, state, group="state-space mixer")
        self.D = Parameter(inner, group="state-space mixer")
        self.conv1d = CausalConv(inner, kernel, activation(act), bias=conv_bias)
        self.in_proj = Linear(hidden, 2 * inner, bias=bias, group="state-space mixer")
        self.x_proj = Linear(inner, sum(self.widths), group="state-space mixer")
        self.dt_proj = Linear(rank, inner, bias=True, group="state-space mixer")
        self.out_proj = Linear(inner, hidden, bias=bias, group="state-space mixer")
        self.norms = None if norms is None else norms()

    def _fused(self, hidden: Tensor, projected: Tensor, a: Tensor) -> Tensor:
        """The rest of the mixer in mamba-ssm's kernels, over a sequence."""
        cache = run_context(hidden).cache
        if not all(isinstance(layer, Linear) and layer.weight.shape[1:] for layer in (self.out_proj, self.x_proj)):
            raise UsageError(NO_PACKED_KERNELS)
        dt_bias = self.dt_proj.bias
        assert dt_bias is not None
        if cache is not None:
            mixed, gate = ops.chunk(projected, 2, 1)
            del gate
            self.conv1d.remembered(mixed, self)
            cache.state(self, (hidden.shape[0], *self.A_log.shape), hidden.dtype, hidden, STATE)
        weights = ops.InnerWeights(
            self.conv1d.weight,
            self.conv1d.bias,
            self.x_proj.weight,
            self._step_weight(),
            self.out_proj.weight,
            a,
            ops.to(self.D, FP32),
            ops.to(dt_bias, FP32),
        )
        return ops.mamba_inner(projected, weights)

    def _step_weight(self) -> Tensor:
        """The weight of `dt_proj` itself [inner, rank]."""
        weight: Tensor = self.dt_proj.weight
        if weight.shape != (self.A_log.shape[0], self.widths[0]):
            raise UsageError(
                "Transformers multiplies with the weight of Mamba's dt_proj itself, which this quantization packs; "
                "leave it out."
            )
        return weight

    def forward(self, hidden: Tensor, rotation: object, mask: Tensor | None) -> tuple[Tensor, None]:
        """[b, s, h] to [b, s, h], as an attention answers, without rotary embedding and probabilities."""
        cache, dtype, length = run_context(hidden).cache, hidden.dtype, hidden.shape[1]
        seen = cache is not None and cache.has_state(self, STATE)
        hidden = masked(hidden, mask)
        projected = ops.transpose(self.in_proj(hidden), 1, 2)
        a = ops.neg(ops.exp(ops.to(self.A_log, FP32)))
        if self.fused_kernels and not (seen and length == 1):
            return self._fused(hidden, projected, a), None
        dt_bias = self.dt_proj.bias
        assert dt_bias is not None
        if self.fused_first and cache is None:
            unused = ops.to(self.D, FP32), ops.to(dt_bias, FP32)
            del unused
        mixed, gate = ops.chunk(projected, 2, 1)
        mixed = self.conv1d.remembered(mixed, self)
        mixed = self.conv1d(mixed, self, length)
        mixed = masked(ops.transpose(mixed, 1, 2), mask)
        steps, b, c = ops.split(self.x_proj(mixed), self.widths, -1)
        if self.norms is not None:
            steps = self.norms[0](steps)
            b = self.norms[1](b)
            c = self.norms[2](c)
        steps = ops.weight_matmul(self._step_weight(), ops.transpose(steps, 1, 2))
        bias = ops.to(dt_bias, FP32)
        shape = (hidden.shape[0], *self.A_log.shape)
        if cache is not None and seen and length == 1:
            state = cache.state(self, shape, dtype, hidden, STATE)
            out = ops.unsqueeze(
                state_update(
                    state,
                    ops.select(ops.transpose(mixed, 1, 2), 2),
                    ops.select(steps, 2),
                    a,
                    ops.select(b, 1),
                    ops.select(c, 1),
                    self.D,
                    ops.select(gate, 2),
                    bias,
                ),
                -1,
            )
        else:
            out, last = selective_scan(
                ops.transpose(mixed, 1, 2),
                steps,
                a,
                ops.transpose(b, 1, 2),
                ops.transpose(c, 1, 2),
                ops.to(self.D, FP32),
                gate,
                bias,
            )
            if cache is not None:
                cache.state(self, shape, last.dtype, last, STATE)
            else:
                del last
        return self.out_proj(ops.to(ops.transpose(out, 1, 2), dtype)), None
