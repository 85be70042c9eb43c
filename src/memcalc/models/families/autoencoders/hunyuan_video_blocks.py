"""Blocks of AutoencoderKLHunyuanVideo: convolutions and attention that look back in time.

Source: diffusers 0.42.1, models/autoencoders/autoencoder_kl_hunyuan_video.py.
"""

from __future__ import annotations

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.nn.layers.diffusion import Convolution, NoDropout
from memcalc.nn.layers.diffusion_blocks import GroupNorm
from memcalc.nn.layers.linear import Linear
from memcalc.nn.module import Module
from memcalc.tables.dtypes import BOOL, FP32, INT32


class CausalConv3d(Module):
    """A convolution behind padding that repeats the edges, in time in front alone."""

    def __init__(self, inputs: int, outputs: int, kernel: int = 3, stride: tuple[int, int, int] = (1, 1, 1)) -> None:
        self.conv = Convolution(inputs, outputs, kernel, kernel, kernel, stride=stride)
        self.extra = kernel - 1

    def forward(self, hidden: Tensor) -> Tensor:
        """[b, inputs, t, h, w] to [b, outputs, t', h', w']."""
        row_by_row = ops.contiguous(hidden)
        batch, channels, *sizes = hidden.shape
        hidden = hidden.tape.empty((batch, channels, *(size + self.extra for size in sizes)), hidden.dtype)
        del row_by_row
        return self.conv(hidden)


class ResnetBlock(Module):
    """Two convolutions behind norms."""

    scope = "resnets"

    def __init__(self, inputs: int, outputs: int, groups: int) -> None:
        self.norm1 = GroupNorm(inputs, groups)
        self.conv1 = CausalConv3d(inputs, outputs)
        self.norm2 = GroupNorm(outputs, groups)
        self.conv2 = CausalConv3d(outputs, outputs)
        self.conv_shortcut = CausalConv3d(inputs, outputs, 1) if inputs != outputs else None

    def forward(self, hidden: Tensor) -> Tensor:
        """[b, inputs, t, h, w] to [b, outputs, t, h, w]."""
        hidden = ops.contiguous(hidden)
        residual = hidden
        hidden = self.norm1(hidden)
        hidden = ops.silu(hidden)
        hidden = self.conv1(hidden)
        hidden = self.norm2(hidden)
        hidden = ops.silu(hidden)
        hidden = self.conv2(hidden)
        if self.conv_shortcut is not None:
            residual = self.conv_shortcut(residual)
        return ops.add(hidden, residual)


class CausalAttention(Module):
    """Attention of one head over the pixels of a frame and of those before it, behind a group norm."""

    scope = "attention"

    def __init__(self, channels: int, groups: int) -> None:
        self.group_norm = GroupNorm(channels, groups)
        self.to_q = Linear(channels, channels, bias=True)
        self.to_k = Linear(channels, channels, bias=True)
        self.to_v = Linear(channels, channels, bias=True)
        self.to_out = [Linear(channels, channels, bias=True), NoDropout()]

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        """[b, s, c] to the same, with a mask [b, s, s]."""
        residual = hidden
        batch, _, channels = hidden.shape
        mask = ops.unsqueeze(mask, 1)
        hidden = ops.transpose(self.group_norm(ops.transpose(hidden, 1, 2)), 1, 2)
        query = self.to_q(hidden)
        encoder = hidden
        key = self.to_k(encoder)
        value = self.to_v(encoder)
        query = ops.transpose(ops.view(query, batch, -1, 1, channels), 1, 2)
        key = ops.transpose(ops.view(key, batch, -1, 1, channels), 1, 2)
        value = ops.transpose(ops.view(value, batch, -1, 1, channels), 1, 2)
        hidden = ops.scaled_dot_product_attention(query, key, value, mask)
        hidden = ops.reshape(ops.transpose(hidden, 1, 2), batch, -1, channels)
        hidden = ops.to(hidden, query.dtype)
        hidden = self.to_out[0](hidden)
        hidden = ops.add(hidden, residual)
        return ops.mul_scalar(hidden)


def _causal_mask(hidden: Tensor, pixels: int) -> Tensor:
    """Zeros and infinities [b, s, s]: a frame sees those before it."""
    tape, (batch, length, _) = hidden.tape, hidden.shape
    indices = tape.empty((length // pixels,), INT32)
    blocks = tape.empty((length,), INT32)
    seen = tape.empty((length, length), BOOL)
    wide = tape.empty((length, length), FP32)
    del seen
    mask = ops.to(wide, hidden.dtype)
    del wide, indices, blocks
    return ops.expand(ops.unsqueeze(mask, 0), batch, length, length)


class MidBlock(Module):
    """A resnet, attention where there is one, and a resnet."""

    scope = "mid block"

    def __init__(self, channels: int, groups: int, *, attends: bool) -> None:
        self.attentions = [CausalAttention(channels, groups)] if attends else []
        self.resnets = [ResnetBlock(channels, channels, groups) for _ in range(2)]

    def forward(self, hidden: Tensor) -> Tensor:
        """[b, c, t, h, w] to the same."""
        hidden = self.resnets[0](hidden)
        for attention in self.attentions:
            batch, channels, frames, height, width = hidden.shape
            hidden = ops.reshape(ops.permute(hidden, 0, 2, 3, 4, 1), batch, -1, channels)
            mask = _causal_mask(hidden, height * width)
            hidden = attention(hidden, mask)
            hidden = ops.permute(ops.view(hidden, batch, frames, height, width, channels), 0, 4, 1, 2, 3)
        return self.resnets[1](hidden)


class Upsample(Module):
    """Twice each side and, but for the first, twice the frames where `time` is 2."""

    scope = "resampling"

    def __init__(self, channels: int, time: int) -> None:
        self.conv = CausalConv3d(channels, channels)
        self.time = time

    def forward(self, hidden: Tensor) -> Tensor:
        """[b, c, t, h, w] to [b, c, t', 2h, 2w]."""
        batch, channels, frames, height, width = hidden.shape
        wide = (batch, channels, 1, 2 * height, 2 * width)
        row_by_row = ops.contiguous(ops.narrow(hidden, 2, 1))
        first = hidden.tape.empty(wide, hidden.dtype)
        del row_by_row
        if frames == 1:
            return self.conv(first)
        others = ops.contiguous(ops.narrow(hidden, 2, frames - 1))
        others = hidden.tape.empty((batch, channels, self.time * (frames - 1), *wide[3:]), hidden.dtype)
        hidden = ops.cat([first, others], 2)
        out: Tensor = self.conv(hidden)
        del others
        return out


class Downsample(Module):
    """A convolution that halves each side, and the frames where `time` is 2."""

    scope = "resampling"

    def __init__(self, channels: int, time: int) -> None:
        self.conv = CausalConv3d(channels, channels, stride=(time, 2, 2))

    def forward(self, hidden: Tensor) -> Tensor:
        """[b, c, t, h, w] to [b, c, t', h / 2, w / 2]."""
        return self.conv(hidden)


class Level(Module):
    """Resnets, and a change of resolution where there is one, under `name`."""

    scope = "residual stream"

    def __init__(self, inputs: int, outputs: int, depth: int, groups: int, resampler: Module | None, name: str) -> None:
        self.resnets = [ResnetBlock(outputs if i else inputs, outputs, groups) for i in range(depth)]
        self.resampler_name = "" if resampler is None else name
        if resampler is not None:
            setattr(self, name, [resampler])

    def forward(self, hidden: Tensor) -> Tensor:
        """[b, inputs, t, h, w] to [b, outputs, t', h', w']."""
        for resnet in self.resnets:
            hidden = resnet(hidden)
        if self.resampler_name:
            (resampler,) = getattr(self, self.resampler_name)
            hidden = resampler(hidden)
        return hidden
