"""The mixer of Mamba 2 and its norms."""

from __future__ import annotations

from dataclasses import dataclass

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.common.assumption import Assumption
from memcalc.config.reader import Config
from memcalc.errors import UsageError
from memcalc.nn.layers.linear import Linear
from memcalc.nn.layers.masks import RECURRENT
from memcalc.nn.layers.mlp import activation
from memcalc.nn.layers.recurrent.causal_conv import CausalConv
from memcalc.nn.layers.recurrent.ssd_scan import NO_PACKED_KERNELS, SCAN_NOTE, chunk_scan, masked, state_update
from memcalc.nn.module import Buffer, Module, Parameter
from memcalc.nn.run_context import run_context
from memcalc.nn.state_space_kernels import StateSpaceMixer
from memcalc.tables.dtypes import FP32

STATE = "state-space states"


class GatedRMSNorm(Module):
    """RMSNorm by groups, in fp32, of an input times an activated gate; the weight multiplies the cast result."""

    scope = "norms"

    def __init__(self, width: int, groups: int = 1) -> None:
        self.weight = Parameter(width, group="norms")
        self.groups = groups

    def forward(self, hidden: Tensor, gate: Tensor) -> Tensor:
        """[..., width] to [..., width]."""
        dtype = hidden.dtype
        hidden = ops.to(hidden, FP32)
        hidden = ops.mul(hidden, ops.silu(ops.to(gate, FP32)))
        lead, width = hidden.shape[:-1], hidden.shape[-1]
        grouped = ops.view(hidden, *lead, self.groups, width // self.groups)
        variance = ops.mean(ops.pow(grouped))
        grouped = ops.mul(grouped, ops.rsqrt(ops.add_scalar(variance)))
        hidden = ops.view(grouped, *lead, width)
        return ops.mul(self.weight, ops.to(hidden, dtype))


@dataclass(frozen=True)
class Mamba2Shape:
    """Sizes of a Mamba 2 mixer: `heads` of `head_dim` make the inner width, b and c are shared in `groups`."""

    heads: int
    head_dim: int
    state: int
    groups: int
    chunk: int
    kernel: int

    @property
    def inner(self) -> int:
        """Width of the inner states."""
        return self.heads * self.head_dim

    @property
    def widths(self) -> list[int]:
        """Inner states, b and c, as the convolution gives them."""
        return [self.inner, self.groups * self.state, self.groups * self.state]


class Mamba2Mixer(StateSpaceMixer):
    """Mamba 2: one projection to gate, inputs, b, c and steps; a causal convolution; the scan; a gated norm; output.

    hidden, shape, act: width of the model, sizes of the mixer, activation after the convolution.
    norm: the gated norm; None: the gate only multiplies.
    conv_bias, bias, out_bias: biases of the convolution, the input projection and the output projection.
    mup_multiplier: input and projection are multiplied, the latter by a buffer (Falcon H1).
    """

    scope = "state-space mixer"
    window = RECURRENT
    assumption: Assumption | None = SCAN_NOTE

    def __init__(
        self,
        hidden: int,
        shape: Mamba2Shape,
        act: str,
        norm: Module | None,
        *,
        conv_bias: bool = True,
        bias: bool = False,
        out_bias: bool = False,
        mup_multiplier: bool = False,
    ) -> None:
        self.shape = shape
        channels = sum(shape.widths)
        projected = shape.inner + channels + shape.heads
        self.dt_bias = Parameter(shape.heads, group="state-space mixer")
        self.A_log = Parameter(shape.heads, group="state-space mixer")
        self.D = Parameter(shape.heads, group="state-space mixer")
        self.mup_vector = Buffer(1, 1, projected, dtype=None) if mup_multiplier else None
        self.conv1d = CausalConv(channels, shape.kernel, activation(act), bias=conv_bias)
        self.in_proj = Linear(hidden, projected, bias=bias, group="state-space mixer")
        self.norm = norm
        self.out_proj = Linear(shape.inner, hidden, bias=out_bias, group="state-space mixer")

    def _fused(self, projected: Tensor, a: Tensor) -> Tensor:
        """The rest of the mixer in mamba-ssm's kernels, over a sequence."""
        cache, shape = run_context(projected).cache, self.shape
        if not isinstance(self.out_proj, Linear) or not self.out_proj.weight.shape[1:]:
            raise UsageError(NO_PACKED_KERNELS)
        if cache is not None:
            _, mixed, _ = ops.split(projected, [shape.inner, sum(shape.widths), shape.heads], -1)
            self.conv1d.remembered(ops.transpose(mixed, 1, 2), self)
            state_shape = (projected.shape[0], shape.heads, shape.head_dim, shape.state)
            cache.state(self, state_shape, projected.dtype, projected, STATE)
        norm = None if self.norm is None else getattr(self.norm, "weight", None)
        weights = (self.conv1d.weight, self.conv1d.bias, self.dt_bias, a, self.D, norm)
        sizes = ops.CombinedShape(shape.heads, shape.head_dim, shape.state, shape.groups, shape.chunk)
        return ops.mamba_combined(projected, sizes, weights, self.out_proj.weight, normed=self.norm is not None)

    def forward(self, hidden: Tensor, rotation: object, mask: Tensor | None) -> tuple[Tensor, None]:
        """[b, s, h] to [b, s, h], as an attention answers, without rotary embedding and probabilities."""
        shape, dtype, (batch, length, _) = self.shape, hidden.dtype, hidden.shape
        cache = run_context(hidden).cache
        hidden = masked(hidden, mask)
        if self.mup_vector is not None:
            hidden = ops.mul_scalar(hidden)
        projected = self.in_proj(hidden)
        if self.mup_vector is not None:
            projected = ops.mul(projected, self.mup_vector)
        a = ops.neg(ops.exp(ops.to(self.A_log, FP32)))
        seen = cache is not None and cache.has_state(self, STATE)
        if self.fused_kernels and not (seen and length == 1):
            return self._fused(projected, a), None
        gate, mixed, dt = ops.split(projected, [shape.inner, sum(shape.widths), shape.heads], -1)
        mixed = ops.transpose(mixed, 1, 2)
        mixed = self.conv1d.remembered(mixed, self)
        mixed = self.conv1d(mixed, self, length)
        mixed = masked(ops.transpose(mixed, 1, 2), mask)
        hidden, b, c = ops.split(mixed, shape.widths, -1)
        state_shape = (batch, shape.heads, shape.head_dim, shape.state)
        state = cache.state(self, state_shape, dtype, hidden, STATE) if cache is not None and seen else None
        if state is not None and length == 1:
            out = self._one_token(state, hidden, dt, a, b, c, gate if self.norm is None else None)
        else:
            scanned, last = chunk_scan(
                ops.view(hidden, batch, length, shape.heads, shape.head_dim),
                dt,
                a,
                ops.view(b, batch, length, shape.groups, shape.state),
                ops.view(c, batch, length, shape.groups, shape.state),
                self.D,
                self.dt_bias,
                shape.chunk,
                state,
            )
            if cache is not None:
                cache.state(self, state_shape, last.dtype, last, STATE)
            else:
                del last
            out = ops.reshape(scanned, batch, length, -1)
            if self.norm is None:
                out = ops.mul(out, ops.silu(gate))
        if self.norm is not None:
            out = self.norm(out, gate)
        return self.out_proj(ops.to(out, dtype)), None

    def _one_token(
        self, state: Tensor, hidden: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, gate: Tensor | None
    ) -> Tensor:
        shape, batch = self.shape, hidden.shape[0]
        gate = None if gate is None else ops.view(gate, batch, shape.heads, shape.head_dim)
        hidden = ops.view(hidden, batch, shape.heads, shape.head_dim)
        dt = ops.expand(ops.transpose(dt, 1, 2), -1, -1, shape.head_dim)
        a = ops.expand(ops.unsqueeze(ops.unsqueeze(a, -1), -1), -1, shape.head_dim, shape.state)
        b = ops.view(b, batch, shape.groups, shape.state)
        c = ops.view(c, batch, shape.groups, shape.state)
        d = ops.expand(ops.unsqueeze(self.D, -1), -1, shape.head_dim)
        dt_bias = ops.expand(ops.unsqueeze(self.dt_bias, -1), -1, shape.head_dim)
        out = state_update(state, hidden, dt, a, b, c, d, dt_bias, gate)
        return ops.view(out, batch, 1, -1)


def head_width(c: Config, inner: int) -> int:
    """Width of a head: `mamba_d_head`, or, where that is "auto", its part of the `inner` width."""
    return inner // c.integer("mamba_n_heads") if c.get("mamba_d_head") == "auto" else c.integer("mamba_d_head")


def mixer_of(c: Config) -> Mamba2Mixer:
    """The mixer that the `mamba_...` keys of a hybrid's config describe."""
    hidden, heads = c.integer("hidden_size"), c.integer("mamba_n_heads")
    shape = Mamba2Shape(
        heads,
        head_width(c, c.integer("mamba_expand") * hidden),
        c.integer("mamba_d_state"),
        c.divides("mamba_n_groups", "mamba_n_heads"),
        c.integer("mamba_chunk_size"),
        c.integer("mamba_d_conv"),
    )
    bias = c.flag("mamba_proj_bias")
    norm = GatedRMSNorm(shape.inner, shape.groups)
    return Mamba2Mixer(
        hidden, shape, c.text("hidden_act"), norm, conv_bias=c.flag("mamba_conv_bias"), bias=bias, out_bias=bias
    )
