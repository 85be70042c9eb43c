"""Layers of video autoencoders that work on some frames at a time: convolutions that look back through caches.

Source: diffusers 0.42.1, models/autoencoders/autoencoder_kl_wan.py.
"""

from __future__ import annotations

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.nn.layers.diffusion import Convolution, NoDropout
from memcalc.nn.module import Module, Parameter
from memcalc.tables.dtypes import FP32

Caches = dict[int, Tensor | None]
"""The last frames that every causal convolution has seen, by its identity; None: nothing but that it ran."""

_CACHED = 2
"""Frames of the caches."""


class CausalConv3d(Module):
    """A convolution that looks back in time: its input is padded in front, by what a cache holds first."""

    def __init__(
        self, inputs: int, outputs: int, *kernel: int, padding: tuple[int, int] = (0, 0), stride: int = 1
    ) -> None:
        self.weight = Parameter(outputs, inputs, *kernel)
        self.bias = Parameter(outputs)
        self.time, self.space = padding
        self.stride = (stride, 1, 1)

    def forward(self, x: Tensor, cache: Tensor | None = None) -> Tensor:
        """[b, inputs, t, h, w] to [b, outputs, t', h', w']."""
        front = 2 * self.time
        if cache is not None and front:
            x = ops.cat([cache, x], 2)
            front -= cache.shape[2]
        x = ops.pad(x, 2, front, (3, 2 * self.space), (4, 2 * self.space))
        return ops.convolution(x, self.weight, self.bias, stride=self.stride)

    def cached(self, x: Tensor, caches: Caches) -> Tensor:
        """The same, with its cache, which then holds the last frames of x."""
        before = caches.get(id(self))
        cache = _last_frames(x, before)
        x = self(x, before)
        caches[id(self)] = cache
        return x


def _last_frames(x: Tensor, before: Tensor | None) -> Tensor:
    """A copy of the last two frames, of which one may be that of an earlier call."""
    cache = ops.clone(ops.narrow(x, 2, min(_CACHED, x.shape[2])))
    if cache.shape[2] < _CACHED and before is not None:
        cache = ops.cat([ops.narrow(before, 2, 1), cache], 2)
    return cache


class ChannelNorm(Module):
    """Channels over their norm, in fp32 (WanRMS_norm)."""

    scope = "norms"

    def __init__(self, width: int, sizes: int) -> None:
        self.gamma = Parameter(width, *(1,) * sizes, group="norms")

    def forward(self, x: Tensor) -> Tensor:
        """[b, c, ...] to the same."""
        normalized = ops.to(self._normalized(ops.to(x, FP32)), x.dtype)
        return ops.add_scalar(ops.mul(ops.mul_scalar(normalized), self.gamma))

    def _normalized(self, x: Tensor) -> Tensor:
        denominator = ops.clamp(x.tape.empty((x.shape[0], 1, *x.shape[2:]), x.dtype))
        return ops.div(x, ops.expand(denominator, *x.shape))


class ResidualBlock(Module):
    """Two causal convolutions behind norms."""

    scope = "resnets"

    def __init__(self, inputs: int, outputs: int) -> None:
        self.norm1 = ChannelNorm(inputs, 3)
        self.conv1 = CausalConv3d(inputs, outputs, 3, 3, 3, padding=(1, 1))
        self.norm2 = ChannelNorm(outputs, 3)
        self.conv2 = CausalConv3d(outputs, outputs, 3, 3, 3, padding=(1, 1))
        self.conv_shortcut = CausalConv3d(inputs, outputs, 1, 1, 1) if inputs != outputs else NoDropout()

    def forward(self, x: Tensor, caches: Caches) -> Tensor:
        """[b, inputs, t, h, w] to [b, outputs, t, h, w]."""
        shortcut = self.conv_shortcut(x)
        x = self.norm1(x)
        x = ops.silu(x)
        x = self.conv1.cached(x, caches)
        x = self.norm2(x)
        x = ops.silu(x)
        x = self.conv2.cached(x, caches)
        return ops.add(x, shortcut)


class FrameAttention(Module):
    """Attention of one head over the pixels of each frame."""

    scope = "attention"

    def __init__(self, width: int) -> None:
        self.norm = ChannelNorm(width, 2)
        self.to_qkv = Convolution(width, 3 * width, 1, 1)
        self.proj = Convolution(width, width, 1, 1)

    def forward(self, x: Tensor, _: Caches) -> Tensor:
        """[b, c, t, h, w] to the same."""
        identity = x
        batch, channels, time, height, width = x.shape
        x = ops.reshape(ops.permute(x, 0, 2, 1, 3, 4), batch * time, channels, height, width)
        x = self.norm(x)
        qkv = self.to_qkv(x)
        qkv = ops.reshape(qkv, batch * time, 1, channels * 3, -1)
        qkv = ops.contiguous(ops.permute(qkv, 0, 1, 3, 2))
        query, key, value = ops.chunk(qkv, 3, -1)
        x = ops.scaled_dot_product_attention(query, key, value)
        x = ops.reshape(ops.permute(ops.squeeze(x, 1), 0, 2, 1), batch * time, channels, height, width)
        x = self.proj(x)
        x = ops.permute(ops.reshape(x, batch, time, channels, height, width), 0, 2, 1, 3, 4)
        return ops.add(x, identity)


class Resample(Module):
    """Each frame halved or doubled, and the frames too where it is `timed`."""

    scope = "resampling"

    def __init__(self, width: int, outputs: int, *, down: bool, timed: bool) -> None:
        self.down, self.timed = down, timed
        self.resample = [NoDropout(), Convolution(width, outputs, 3, 3, stride=2 if down else 1, padding=int(not down))]
        if timed and down:
            self.time_conv = CausalConv3d(width, width, 3, 1, 1, stride=2)
        elif timed:
            self.time_conv = CausalConv3d(width, 2 * width, 3, 1, 1, padding=(1, 0))

    def forward(self, x: Tensor, caches: Caches) -> Tensor:
        """[b, c, t, h, w] resampled."""
        if self.timed and not self.down:
            x = self._doubled(x, caches)
        batch, channels, time, height, width = x.shape
        x = ops.reshape(ops.permute(x, 0, 2, 1, 3, 4), batch * time, channels, height, width)
        x = self._resampled(x)
        x = ops.permute(ops.view(x, batch, time, *x.shape[1:]), 0, 2, 1, 3, 4)
        return self._halved(x, caches) if self.timed and self.down else x

    def _resampled(self, x: Tensor) -> Tensor:
        x = ops.pad(x, 2, 1, (3, 1)) if self.down else self._upsampled(x)
        return self.resample[1](x)  # type: ignore[no-any-return]

    def _upsampled(self, x: Tensor) -> Tensor:
        dtype, sizes = x.dtype, (2 * x.shape[2], 2 * x.shape[3])
        return ops.to(ops.upsample_nearest(ops.to(x, FP32), sizes), dtype)

    def _doubled(self, x: Tensor, caches: Caches) -> Tensor:
        """Twice the frames, but for the first of a video."""
        key = id(self.time_conv)
        if key not in caches:
            caches[key] = None
            return x
        batch, channels, time, height, width = x.shape
        before = caches[key]
        cache = _last_frames(x, before)
        if cache.shape[2] < _CACHED:
            cache = ops.cat([ops.empty_like(cache), cache], 2)
        x = self.time_conv(x, before)
        caches[key] = cache
        del before
        x = ops.reshape(x, batch, 2, channels, time, height, width)
        x = ops.stack([ops.select(x, 1), ops.select(x, 1)], 3)
        return ops.reshape(x, batch, channels, 2 * time, height, width)

    def _halved(self, x: Tensor, caches: Caches) -> Tensor:
        """Half the frames, but for the first of a video."""
        key = id(self.time_conv)
        before = caches.get(key)
        if before is None:
            caches[key] = ops.clone(x)
            return x
        cache = ops.clone(ops.narrow(x, 2, 1))
        x = self.time_conv(ops.cat([ops.narrow(before, 2, 1), x], 2))
        caches[key] = cache
        return x
