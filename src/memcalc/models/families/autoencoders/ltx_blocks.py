"""Blocks of AutoencoderKLLTXVideo: convolutions that repeat the first (and last) frame, behind norms without weights.

Source: diffusers 0.42.1, models/autoencoders/autoencoder_kl_ltx.py.
"""

from __future__ import annotations

from math import prod

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.nn.layers.diffusion import Convolution, TimestepEmbedding, timestep_embedding
from memcalc.nn.layers.diffusion_norms import BareRMSNorm
from memcalc.nn.layers.norms import LayerNorm
from memcalc.nn.module import Module, Parameter

Step = tuple[int, int, int]
"""Frames, rows and columns that a change of resolution makes one of."""


class CausalConv3d(Module):
    """A convolution behind repeats of the first frame, or of the first and the last where it is not causal."""

    def __init__(self, inputs: int, outputs: int, kernel: int = 3, *, causal: bool, stride: int = 1) -> None:
        padding = (0, kernel // 2, kernel // 2)
        self.conv = Convolution(inputs, outputs, kernel, kernel, kernel, stride=stride, padding=padding)
        self.causal, self.kernel = causal, kernel

    def forward(self, hidden: Tensor) -> Tensor:
        """[b, inputs, t, h, w] to [b, outputs, t', h', w']."""
        extra = self.kernel - 1
        if not extra:
            hidden = ops.cat([hidden], 2)
        elif self.causal:
            pad_left = ops.repeat(ops.narrow(hidden, 2, 1), 1, 1, extra)
            hidden = ops.cat([pad_left, hidden], 2)
        else:
            pad_left = ops.repeat(ops.narrow(hidden, 2, 1), 1, 1, extra // 2)
            pad_right = ops.repeat(ops.narrow(hidden, 2, 1), 1, 1, extra // 2)
            hidden = ops.cat([pad_left, hidden, pad_right], 2)
        return self.conv(hidden)


def channels_normalized(norm: Module, hidden: Tensor) -> Tensor:
    """What a norm over the last dimension makes of the channels of [b, c, t, h, w]."""
    return ops.permute(norm(ops.permute(hidden, 0, 2, 3, 4, 1)), 0, 4, 1, 2, 3)


class TimeEmbedder(Module):
    """The time step as so many channels (PixArtAlphaCombinedTimestepSizeEmbeddings)."""

    scope = "embedding"

    def __init__(self, width: int) -> None:
        self.timestep_embedder = TimestepEmbedding(256, width)

    def forward(self, timestep: Tensor, hidden: Tensor) -> Tensor:
        """[b] to [b, width, 1, 1, 1], in the dtype of hidden."""
        projected = timestep_embedding(timestep, 256)
        embedded: Tensor = self.timestep_embedder(ops.to(projected, hidden.dtype))
        return ops.view(embedded, hidden.shape[0], -1, 1, 1, 1)


def shifts(temb: Tensor, own: Tensor, parts: int) -> list[Tensor]:
    """Shifts and scales [b, c, 1, 1, 1] of a time step [b, parts · c, 1, 1, 1] and a table [parts, c]."""
    temb = ops.view(temb, temb.shape[0], parts, -1, 1, 1, 1)
    temb = ops.add(temb, ops.view(own, 1, *own.shape, 1, 1, 1))
    return list(ops.unbind(temb, 1))


class ResnetBlock3d(Module):
    """Two convolutions behind norms, which a time step may shift and to which noise may be added.

    noise: a scale a channel for noise behind either convolution (`inject_noise`).
    timed: a table of shifts and scales for the time step (`timestep_conditioning`).
    """

    scope = "resnets"

    def __init__(self, inputs: int, outputs: int, *, causal: bool, noise: bool = False, timed: bool = False) -> None:
        self.norm1 = BareRMSNorm()
        self.conv1 = CausalConv3d(inputs, outputs, causal=causal)
        self.norm2 = BareRMSNorm()
        self.conv2 = CausalConv3d(outputs, outputs, causal=causal)
        self.widens = inputs != outputs
        if self.widens:
            self.norm3 = LayerNorm(inputs)
            self.conv_shortcut = CausalConv3d(inputs, outputs, 1, causal=causal)
        self.per_channel_scale1 = Parameter(inputs, 1, 1) if noise else None
        self.per_channel_scale2 = Parameter(inputs, 1, 1) if noise else None
        self.scale_shift_table = Parameter(4, inputs) if timed else None

    def forward(self, inputs: Tensor, temb: Tensor | None = None) -> Tensor:
        """[b, inputs, t, h, w] to [b, outputs, t, h, w]."""
        hidden = inputs
        hidden = channels_normalized(self.norm1, hidden)
        scale_2 = shift_2 = None
        if self.scale_shift_table is not None and temb is not None:
            shift_1, scale_1, shift_2, scale_2 = shifts(temb, self.scale_shift_table, 4)
            hidden = ops.add(ops.mul(hidden, ops.add_scalar(scale_1)), shift_1)
        hidden = ops.silu(hidden)
        hidden = self.conv1(hidden)
        noise = None  # it stays until there is other noise
        if self.per_channel_scale1 is not None:
            noise = hidden.tape.empty((1, *hidden.shape[-2:]), hidden.dtype)
            hidden = ops.add(hidden, _scaled(noise, self.per_channel_scale1))
        hidden = channels_normalized(self.norm2, hidden)
        if scale_2 is not None and shift_2 is not None:
            hidden = ops.add(ops.mul(hidden, ops.add_scalar(scale_2)), shift_2)
        hidden = ops.silu(hidden)
        hidden = self.conv2(hidden)
        if self.per_channel_scale2 is not None:
            noise = hidden.tape.empty((1, *hidden.shape[-2:]), hidden.dtype)
            hidden = ops.add(hidden, _scaled(noise, self.per_channel_scale2))
        if self.widens:
            inputs = channels_normalized(self.norm3, inputs)
            inputs = self.conv_shortcut(inputs)
        hidden = ops.add(hidden, inputs)
        del noise
        return hidden


def _scaled(noise: Tensor, scale: Tensor) -> Tensor:
    """Noise [1, h, w] of one picture, scaled for every channel: [1, c, 1, h, w]."""
    return ops.unsqueeze(ops.unsqueeze(ops.mul(noise, scale), 0), 2)


def folded(hidden: Tensor, step: Step) -> Tensor:
    """[b, c, t, h, w] to [b, c · prod(step), t', h', w'], a copy: neighbours become channels."""
    batch, channels, *sizes = hidden.shape
    frames, rows, columns = (size // part for size, part in zip(sizes, step, strict=True))
    hidden = ops.view(hidden, batch, channels, frames, step[0], rows, step[1], columns, step[2])
    hidden = ops.permute(hidden, 0, 1, 3, 5, 7, 2, 4, 6)
    return ops.reshape(hidden, batch, channels * prod(step), frames, rows, columns)


def unfolded(hidden: Tensor, step: Step) -> Tensor:
    """[b, c, t, h, w] to [b, c / prod(step), t', h', w'], a copy: channels become neighbours."""
    batch, channels, frames, rows, columns = hidden.shape
    hidden = ops.reshape(hidden, batch, channels // prod(step), *step, frames, rows, columns)
    hidden = ops.permute(hidden, 0, 1, 5, 2, 6, 3, 7, 4)
    return ops.reshape(hidden, batch, channels // prod(step), frames * step[0], rows * step[1], columns * step[2])


class Downsampler3d(Module):
    """A convolution whose neighbours become channels, beside an average (LTX-Video 0.9.5)."""

    scope = "resampling"

    def __init__(self, inputs: int, outputs: int, step: Step, *, causal: bool) -> None:
        self.step, self.outputs = step, outputs
        self.conv = CausalConv3d(inputs, outputs // prod(step), causal=causal)

    def forward(self, hidden: Tensor) -> Tensor:
        """[b, inputs, t, h, w] to [b, outputs, t', h', w']."""
        first = [ops.narrow(hidden, 2, self.step[0] - 1)] if self.step[0] > 1 else []
        hidden = ops.cat([*first, hidden], 2)
        residual = folded(hidden, self.step)
        batch, channels, *sizes = residual.shape
        residual = ops.mean(ops.view(residual, batch, self.outputs, channels // self.outputs, *sizes), 2, keepdim=False)
        hidden = self.conv(hidden)
        hidden = folded(hidden, self.step)
        return ops.add(hidden, residual)


class Upsampler3d(Module):
    """A convolution whose channels become neighbours, beside repeated channels where there is a `residual`."""

    scope = "resampling"

    def __init__(self, inputs: int, factor: int, *, causal: bool, residual: bool) -> None:
        self.step: Step = (2, 2, 2)
        self.residual, self.factor = residual, factor
        self.conv = CausalConv3d(inputs, inputs * prod(self.step) // factor, causal=causal)

    def forward(self, hidden: Tensor) -> Tensor:
        """[b, inputs, t, h, w] to [b, inputs / factor, 2 t - 1, 2h, 2w]."""
        residual = None
        if self.residual:
            residual = unfolded(hidden, self.step)
            residual = ops.repeat(residual, 1, prod(self.step) // self.factor)
            residual = ops.narrow(residual, 2, residual.shape[2] - 1)
        hidden = self.conv(hidden)
        hidden = unfolded(hidden, self.step)
        hidden = ops.narrow(hidden, 2, hidden.shape[2] - 1)
        return hidden if residual is None else ops.add(hidden, residual)


class DownBlock3D(Module):
    """Resnets, a convolution that halves all sizes, and a resnet where there are more channels behind it."""

    scope = "residual stream"

    def __init__(self, inputs: int, outputs: int, depth: int, *, causal: bool, halves: bool) -> None:
        self.resnets = [ResnetBlock3d(inputs, inputs, causal=causal) for _ in range(depth)]
        self.downsamplers = [CausalConv3d(inputs, inputs, causal=causal, stride=2)] if halves else []
        self.conv_out = ResnetBlock3d(inputs, outputs, causal=causal) if inputs != outputs else None

    def forward(self, hidden: Tensor) -> Tensor:
        """[b, inputs, t, h, w] to [b, outputs, t', h', w']."""
        for resnet in self.resnets:
            hidden = resnet(hidden)
        for downsampler in self.downsamplers:
            hidden = downsampler(hidden)
        return hidden if self.conv_out is None else self.conv_out(hidden)


class NewDownBlock3D(Module):
    """Resnets and a downsampler (LTXVideo095DownBlock3D)."""

    scope = "residual stream"

    def __init__(self, inputs: int, depth: int, downsampler: Module | None, *, causal: bool) -> None:
        self.resnets = [ResnetBlock3d(inputs, inputs, causal=causal) for _ in range(depth)]
        self.downsamplers = [] if downsampler is None else [downsampler]

    def forward(self, hidden: Tensor) -> Tensor:
        """[b, inputs, t, h, w] to [b, outputs, t', h', w']."""
        for block in (*self.resnets, *self.downsamplers):
            hidden = block(hidden)
        return hidden


class MidBlock3d(Module):
    """Resnets, which a time step may shift."""

    scope = "mid block"

    def __init__(self, width: int, depth: int, *, causal: bool, noise: bool = False, timed: bool = False) -> None:
        self.time_embedder = TimeEmbedder(4 * width) if timed else None
        self.resnets = [ResnetBlock3d(width, width, causal=causal, noise=noise, timed=timed) for _ in range(depth)]

    def forward(self, hidden: Tensor, temb: Tensor | None = None) -> Tensor:
        """[b, c, t, h, w] to the same."""
        if self.time_embedder is not None and temb is not None:
            temb = self.time_embedder(temb, hidden)
        for resnet in self.resnets:
            hidden = resnet(hidden, temb)
        return hidden


class UpBlock3d(Module):
    """A resnet where there were other channels, an upsampler, and resnets, which a time step may shift."""

    scope = "residual stream"

    def __init__(
        self, inputs: int, outputs: int, depth: int, upsampler: Module | None, *, causal: bool, noise: bool, timed: bool
    ) -> None:
        self.time_embedder = TimeEmbedder(4 * inputs) if timed else None
        widens = inputs != outputs
        self.conv_in = ResnetBlock3d(inputs, outputs, causal=causal, noise=noise, timed=timed) if widens else None
        self.upsamplers = [] if upsampler is None else [upsampler]
        self.resnets = [ResnetBlock3d(outputs, outputs, causal=causal, noise=noise, timed=timed) for _ in range(depth)]

    def forward(self, hidden: Tensor, temb: Tensor | None = None) -> Tensor:
        """[b, inputs, t, h, w] to [b, outputs, t', h', w']."""
        if self.conv_in is not None:
            hidden = self.conv_in(hidden, temb)
        if self.time_embedder is not None and temb is not None:
            temb = self.time_embedder(temb, hidden)
        for upsampler in self.upsamplers:
            hidden = upsampler(hidden)
        for resnet in self.resnets:
            hidden = resnet(hidden, temb)
        return hidden
