"""Blocks of AutoencoderDC: resnets, linear attention over pixels, and changes of resolution.

Source: diffusers 0.42.1, models/autoencoders/autoencoder_dc.py, models/attention_processor.py (SanaMultiscale...).
"""

from __future__ import annotations

from collections.abc import Sequence

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.config.reader import Config
from memcalc.errors import ConfigError
from memcalc.nn.layers.diffusion import Convolution
from memcalc.nn.layers.diffusion_norms import EagerRMSNorm
from memcalc.nn.layers.linear import Linear
from memcalc.nn.module import Module
from memcalc.tables.dtypes import FP32


def channels_last(x: Tensor) -> Tensor:
    """[b, c, h, w] seen as [b, h, w, c]."""
    return ops.permute(x, 0, 2, 3, 1)


def channels_first(x: Tensor) -> Tensor:
    """[b, h, w, c] seen as [b, c, h, w]."""
    return ops.permute(x, 0, 3, 1, 2)


class ResBlock(Module):
    """Two convolutions and a norm of the channels."""

    scope = "resnets"

    def __init__(self, channels: int) -> None:
        self.conv1 = Convolution(channels, channels, 3, 3, padding=1)
        self.conv2 = Convolution(channels, channels, 3, 3, padding=1, bias=False)
        self.norm = EagerRMSNorm(channels, bias=True)

    def forward(self, hidden: Tensor) -> Tensor:
        """[b, c, h, w] to the same."""
        residual = hidden
        hidden = self.conv1(hidden)
        hidden = ops.silu(hidden)
        hidden = self.conv2(hidden)
        hidden = channels_first(self.norm(channels_last(hidden)))
        return ops.add(hidden, residual)


class MultiscaleProjection(Module):
    """Queries, keys and values as their neighbours make them."""

    def __init__(self, channels: int, dim: int, kernel: int) -> None:
        self.proj_in = Convolution(1, channels, kernel, kernel, padding=kernel // 2, bias=False)
        self.proj_out = Convolution(dim, channels, 1, 1, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """[b, c, h, w] to the same."""
        hidden = self.proj_in(hidden)
        return self.proj_out(hidden)


class MultiscaleLinearAttention(Module):
    """Linear attention in fp32 over pixels at several scales; over few pixels the scores are made."""

    scope = "attention"

    def __init__(self, channels: int, dim: int, kernels: Sequence[int]) -> None:
        self.dim = dim
        inner = channels // dim * dim
        self.to_q = Linear(channels, inner)
        self.to_k = Linear(channels, inner)
        self.to_v = Linear(channels, inner)
        self.to_qkv_multiscale = [MultiscaleProjection(3 * inner, dim, kernel) for kernel in kernels]
        self.to_out = Linear(inner * (1 + len(kernels)), channels)
        self.norm_out = EagerRMSNorm(channels, bias=True)

    def forward(self, hidden: Tensor) -> Tensor:
        """[b, c, h, w] to the same."""
        residual, dtype = hidden, hidden.dtype
        batch, _, height, width = hidden.shape
        hidden = channels_last(hidden)
        query, key, value = self.to_q(hidden), self.to_k(hidden), self.to_v(hidden)
        hidden = ops.cat([query, key, value], 3)
        hidden = channels_first(hidden)
        scales = [hidden]
        for block in self.to_qkv_multiscale:
            scales.append(block(hidden))
        hidden = ops.cat(scales, 1)
        linear = height * width > self.dim
        if linear:
            hidden = ops.to(hidden, FP32)
        hidden = ops.reshape(hidden, batch, -1, 3 * self.dim, height * width)
        query, key, value = ops.chunk(hidden, 3, 2)
        query = ops.relu(query)
        key = ops.relu(key)
        hidden = _linear(query, key, value) if linear else _quadratic(query, key, value)
        hidden = ops.to(hidden, dtype)
        hidden = ops.reshape(hidden, batch, -1, height, width)
        hidden = channels_first(self.to_out(channels_last(hidden)))
        hidden = channels_first(self.norm_out(channels_last(hidden)))
        return ops.add(hidden, residual)


def _linear(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Values [b, heads, d, s] weighed without making scores of all pairs."""
    value = ops.pad(value, 2, 1)
    scores = ops.matmul(value, ops.transpose(key, -1, -2))
    hidden = ops.matmul(scores, query)
    last = ops.narrow(hidden, 2, 1)
    return ops.div(ops.narrow(hidden, 2, hidden.shape[2] - 1), ops.add_scalar(last))


def _quadratic(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Values [b, heads, d, s] weighed by scores of all pairs, which are normalized in fp32."""
    scores = ops.matmul(ops.transpose(key, -1, -2), query)
    scores = ops.to(scores, FP32)
    scores = ops.div(scores, ops.add_scalar(ops.sum(scores, 2, keepdim=True)))
    return ops.matmul(value, ops.to(scores, value.dtype))


class NormedGLUMBConv(Module):
    """Convolutions of one pixel around a depthwise one, half of which gates the other, and a norm."""

    scope = "MLP"

    def __init__(self, channels: int) -> None:
        inner = 4 * channels
        self.conv_inverted = Convolution(channels, 2 * inner, 1, 1)
        self.conv_depth = Convolution(1, 2 * inner, 3, 3, padding=1)
        self.conv_point = Convolution(inner, channels, 1, 1, bias=False)
        self.norm = EagerRMSNorm(channels, bias=True)

    def forward(self, hidden: Tensor) -> Tensor:
        """[b, c, h, w] to the same."""
        residual = hidden
        hidden = self.conv_inverted(hidden)
        hidden = ops.silu(hidden)
        hidden = self.conv_depth(hidden)
        hidden, gate = ops.chunk(hidden, 2, 1)
        hidden = ops.mul(hidden, ops.silu(gate))
        hidden = self.conv_point(hidden)
        hidden = channels_first(self.norm(channels_last(hidden)))
        return ops.add(hidden, residual)


class EfficientViTBlock(Module):
    """Linear attention and convolutions."""

    scope = "residual stream"

    def __init__(self, channels: int, dim: int, kernels: Sequence[int]) -> None:
        self.attn = MultiscaleLinearAttention(channels, dim, kernels)
        self.conv_out = NormedGLUMBConv(channels)

    def forward(self, x: Tensor) -> Tensor:
        """[b, c, h, w] to the same."""
        x = self.attn(x)
        return self.conv_out(x)


def _unshuffled(x: Tensor) -> Tensor:
    """`pixel_unshuffle`: [b, c, 2h, 2w] to [b, 4c, h, w], a copy."""
    batch, channels, height, width = x.shape
    return x.tape.empty((batch, 4 * channels, height // 2, width // 2), x.dtype)


def _shuffled(x: Tensor) -> Tensor:
    """`pixel_shuffle`: [b, 4c, h, w] to [b, c, 2h, 2w], a copy."""
    batch, channels, height, width = x.shape
    return x.tape.empty((batch, channels // 4, 2 * height, 2 * width), x.dtype)


def averaged(x: Tensor, channels: int) -> Tensor:
    """Means of groups of channels."""
    return ops.mean(ops.view(x, x.shape[0], channels, -1, *x.shape[2:]), 2, keepdim=False)


def repeated(x: Tensor, channels: int) -> Tensor:
    """Channels that are repeated (`repeat_interleave`), a copy."""
    return x.tape.empty((x.shape[0], channels, *x.shape[2:]), x.dtype)


class DownBlock(Module):
    """Half of each side, beside an average where there is a shortcut."""

    scope = "resampling"

    def __init__(self, inputs: int, outputs: int, *, unshuffles: bool, shortcut: bool = True) -> None:
        self.unshuffles, self.outputs, self.shortcut = unshuffles, outputs, shortcut
        self.conv = Convolution(
            inputs, outputs // 4 if unshuffles else outputs, 3, 3, stride=1 if unshuffles else 2, padding=1
        )

    def forward(self, hidden: Tensor) -> Tensor:
        """[b, inputs, 2h, 2w] to [b, outputs, h, w]."""
        x = self.conv(hidden)
        if self.unshuffles:
            x = _unshuffled(x)
        if not self.shortcut:
            return x
        y = _unshuffled(hidden)
        y = averaged(y, self.outputs)
        return ops.add(x, y)


class UpBlock(Module):
    """Twice each side, beside repeated channels where there is a shortcut."""

    scope = "resampling"

    def __init__(self, inputs: int, outputs: int, *, interpolates: bool, shortcut: bool = True) -> None:
        self.interpolates, self.outputs, self.shortcut = interpolates, outputs, shortcut
        self.conv = Convolution(inputs, outputs if interpolates else 4 * outputs, 3, 3, padding=1)

    def forward(self, hidden: Tensor) -> Tensor:
        """[b, inputs, h, w] to [b, outputs, 2h, 2w]."""
        if self.interpolates:
            x = ops.upsample_nearest(hidden, (2 * hidden.shape[2], 2 * hidden.shape[3]))
            x = self.conv(x)
        else:
            x = self.conv(hidden)
            x = _shuffled(x)
        if not self.shortcut:
            return x
        y = repeated(hidden, 4 * self.outputs)
        y = _shuffled(y)
        return ops.add(x, y)


class Level(Module):
    """Blocks one after another (`torch.nn.Sequential`)."""

    scope = "residual stream"

    def __init__(self, blocks: Sequence[Module]) -> None:
        for index, block in enumerate(blocks):
            setattr(self, str(index), block)
        self.depth = len(blocks)

    def forward(self, x: Tensor) -> Tensor:
        """What all of them make of x."""
        for index in range(self.depth):
            x = getattr(self, str(index))(x)
        return x


def levels(c: Config, half: str) -> list[list[Module]]:
    """The blocks of each level of `half` (encoder or decoder). Raises ConfigError for kinds that are not described."""
    channels, layers = c.integers(f"{half}_block_out_channels"), c.integers(f"{half}_layers_per_block", minimum=0)
    kinds, scales = _each(c, f"{half}_block_types", len(channels)), c.items(f"{half}_qkv_multiscales") or []
    if len(layers) != len(channels) or not layers[0]:
        raise ConfigError(f"{c.where} has levels under '{half}_layers_per_block' that memcalc does not describe.")
    if half == "decoder":
        for key, usual in (("decoder_norm_types", "rms_norm"), ("decoder_act_fns", "silu")):
            if any(kind != usual for kind in _each(c, key, len(channels))):
                raise ConfigError(f"{c.where} has a decoder of another kind under '{key}' than {usual}.")
    found: list[list[Module]] = []
    for size, count, kind, kernels in zip(channels, layers, kinds, scales, strict=True):
        if kind not in ("ResBlock", "EfficientViTBlock"):
            raise ConfigError(
                f"{c.where} has blocks under '{half}_block_types' that memcalc does not describe: {kind}."
            )
        widths = [int(str(width)) for width in kernels] if isinstance(kernels, (list, tuple)) else []
        dim = c.integer("attention_head_dim")
        found.append(
            [ResBlock(size) if kind == "ResBlock" else EfficientViTBlock(size, dim, widths) for _ in range(count)]
        )
    return found


def _each(c: Config, key: str, count: int) -> list[object]:
    value = c.get(key)
    return list(value) if isinstance(value, (list, tuple)) else [value] * count
