"""Blocks of AutoencoderKLCogVideoX: convolutions that look back through caches, norms that look at the latents.

Source: diffusers 0.42.1, models/autoencoders/autoencoder_kl_cogvideox.py, models/{upsampling,downsampling}.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.nn.layers.diffusion import Convolution
from memcalc.nn.layers.diffusion_blocks import GroupNorm
from memcalc.nn.module import Module

_LARGEST = 2 * 1024**3
"""Bytes in 16 bits of an input from which on a convolution takes it in parts."""


@dataclass
class Caches:
    """The last frames that every convolution saw in the call before, and in this one, by its identity."""

    before: dict[int, Tensor] = field(default_factory=dict)
    after: dict[int, Tensor] = field(default_factory=dict)

    def turn(self) -> None:
        """A call ends: what it saw is what the next one finds."""
        self.before, self.after = self.after, {}


class SafeConv3d(Convolution):
    """A convolution that takes large inputs in parts, some frames at a time."""

    def forward(self, x: Tensor) -> Tensor:
        """[b, inputs, t, h, w] to [b, outputs, t', h', w']."""
        parts = 2 * x.numel // _LARGEST + 1
        if 2 * x.numel <= _LARGEST:
            return super().forward(x)
        kernel, frames = self.weight.shape[2], x.shape[2]
        size = -(-frames // parts)
        lengths = [min(size, frames - start) for start in range(0, frames, size)]
        chunks = [ops.narrow(x, 2, length) for length in lengths]
        if kernel > 1:
            joined = [
                ops.cat([ops.narrow(last, 2, min(kernel - 1, last.shape[2])), own], 2) for last, own in pairwise(chunks)
            ]
            chunks = [chunks[0], *joined]
        outputs = [super(SafeConv3d, self).forward(chunk) for chunk in chunks]
        return ops.cat(outputs, 2)


class CausalConv3d(Module):
    """A convolution that looks back in time: into its cache, or else at the first frame repeated."""

    def __init__(self, inputs: int, outputs: int, kernel: int = 3) -> None:
        self.conv = SafeConv3d(inputs, outputs, kernel, kernel, kernel, padding=(0, kernel // 2, kernel // 2))
        self.kernel = kernel

    def forward(self, inputs: Tensor, caches: Caches) -> Tensor:
        """[b, inputs, t, h, w] to [b, outputs, t, h, w]."""
        if self.kernel > 1:
            cache = caches.before.get(id(self))
            first = [ops.narrow(inputs, 2, 1)] * (self.kernel - 1) if cache is None else [cache]
            inputs = ops.cat([*first, inputs], 2)
            del first, cache
        seen = inputs if self.kernel == 1 else ops.narrow(inputs, 2, self.kernel - 1)
        caches.after[id(self)] = ops.clone(seen)
        del seen
        return self.conv(inputs)


class SpatialNorm3D(Module):
    """A group norm, scaled and shifted by convolutions of the latents."""

    scope = "norms"

    def __init__(self, channels: int, latents: int, groups: int) -> None:
        self.norm_layer = GroupNorm(channels, groups)
        self.conv_y = CausalConv3d(latents, channels, 1)
        self.conv_b = CausalConv3d(latents, channels, 1)

    def forward(self, f: Tensor, zq: Tensor, caches: Caches) -> Tensor:
        """[b, c, t, h, w] and latents [b, z, t', h', w'] to [b, c, t, h, w]."""
        frames, sides = f.shape[2], f.shape[3:]
        z_first = z_rest = None
        if frames > 1 and frames % 2:
            z_first, z_rest = ops.narrow(zq, 2, 1), ops.narrow(zq, 2, zq.shape[2] - 1)
            z_first = ops.upsample_nearest(z_first, (1, *sides))
            z_rest = ops.upsample_nearest(z_rest, (frames - 1, *sides))
            zq = ops.cat([z_first, z_rest], 2)
        else:
            zq = ops.upsample_nearest(zq, (frames, *sides))
        conv_y = self.conv_y(zq, caches)
        conv_b = self.conv_b(zq, caches)
        norm_f = self.norm_layer(f)
        new_f = ops.add(ops.mul(norm_f, conv_y), conv_b)
        del z_first, z_rest
        return new_f


def normed(norm: GroupNorm | SpatialNorm3D, hidden: Tensor, zq: Tensor | None, caches: Caches) -> Tensor:
    """What a norm of either kind makes of hidden."""
    if isinstance(norm, SpatialNorm3D):
        assert zq is not None
        return norm(hidden, zq, caches)
    return norm(hidden)


class ResnetBlock3D(Module):
    """Two convolutions behind norms; `latents`: their channels, where the norms look at them."""

    scope = "resnets"

    def __init__(self, inputs: int, outputs: int, groups: int, latents: int | None) -> None:
        self.norm1, self.norm2 = (
            GroupNorm(size, groups) if latents is None else SpatialNorm3D(size, latents, groups)
            for size in (inputs, outputs)
        )
        self.conv1 = CausalConv3d(inputs, outputs)
        self.conv2 = CausalConv3d(outputs, outputs)
        self.conv_shortcut = SafeConv3d(inputs, outputs, 1, 1, 1) if inputs != outputs else None

    def forward(self, inputs: Tensor, zq: Tensor | None, caches: Caches) -> Tensor:
        """[b, inputs, t, h, w] to [b, outputs, t, h, w]."""
        hidden = inputs
        hidden = normed(self.norm1, hidden, zq, caches)
        hidden = ops.silu(hidden)
        hidden = self.conv1(hidden, caches)
        hidden = normed(self.norm2, hidden, zq, caches)
        hidden = ops.silu(hidden)
        hidden = self.conv2(hidden, caches)
        if self.conv_shortcut is not None:
            inputs = self.conv_shortcut(inputs)
        return ops.add(hidden, inputs)


def _frame_by_frame(x: Tensor) -> Tensor:
    """[b, c, t, h, w] to [b · t, c, h, w]."""
    batch, channels, frames, *sides = x.shape
    return ops.reshape(ops.permute(x, 0, 2, 1, 3, 4), batch * frames, channels, *sides)


def _as_video(x: Tensor, batch: int) -> Tensor:
    """[b · t, c, h, w] to [b, c, t, h, w], a view."""
    return ops.permute(ops.reshape(x, batch, x.shape[0] // batch, *x.shape[1:]), 0, 2, 1, 3, 4)


class Downsample3D(Module):
    """A convolution that halves each side behind means of two frames, if it is `timed`."""

    scope = "resampling"

    def __init__(self, channels: int, *, timed: bool) -> None:
        self.conv = Convolution(channels, channels, 3, 3, stride=2)
        self.timed = timed

    def forward(self, x: Tensor) -> Tensor:
        """[b, c, t, h, w] to [b, c, t', h / 2, w / 2]."""
        batch, channels, frames, height, width = x.shape
        x_first = x_rest = None
        if self.timed:
            x = ops.reshape(ops.permute(x, 0, 3, 4, 1, 2), batch * height * width, channels, frames)
            if frames % 2:
                x_first, x_rest = ops.select(x, -1), ops.narrow(x, -1, frames - 1)
                rest = [] if frames == 1 else [_halved(x_rest)]
                x_rest = None if frames == 1 else rest[0]
                x = ops.cat([ops.unsqueeze(x_first, -1), *rest], -1)
                del rest
            else:
                x = _halved(x)
            x = ops.permute(ops.reshape(x, batch, height, width, channels, x.shape[-1]), 0, 3, 4, 1, 2)
        x = ops.pad(x, 3, 1, (4, 1))
        x = _frame_by_frame(x)
        x = self.conv(x)
        x = _as_video(x, batch)
        del x_first, x_rest
        return x


def _halved(x: Tensor) -> Tensor:
    """Means of two neighbours along the last dimension (`avg_pool1d`)."""
    row_by_row = ops.contiguous(x)
    out = x.tape.empty((*x.shape[:-1], x.shape[-1] // 2), x.dtype)
    del row_by_row
    return out


class Upsample3D(Module):
    """Twice each side and, if it is `timed`, all frames but the first twice; then a convolution."""

    scope = "resampling"

    def __init__(self, channels: int, *, timed: bool) -> None:
        self.conv = Convolution(channels, channels, 3, 3, padding=1)
        self.timed = timed

    def forward(self, inputs: Tensor) -> Tensor:
        """[b, c, t, h, w] to [b, c, t', 2h, 2w]."""
        batch, _, frames, *sides = inputs.shape
        wide = tuple(2 * side for side in sides)
        x_first = x_rest = None
        if not self.timed:
            inputs = _frame_by_frame(inputs)
            inputs = ops.upsample_nearest(inputs, wide)
            inputs = _as_video(inputs, batch)
        elif frames > 1 and frames % 2:
            x_first, x_rest = ops.select(inputs, 2), ops.narrow(inputs, 2, frames - 1)
            x_first = ops.upsample_nearest(x_first, wide)
            x_rest = ops.upsample_nearest(x_rest, (2 * (frames - 1), *wide))
            x_first = ops.unsqueeze(x_first, 2)
            inputs = ops.cat([x_first, x_rest], 2)
        elif frames > 1:
            inputs = ops.upsample_nearest(inputs, (2 * frames, *wide))
        else:
            inputs = ops.unsqueeze(ops.upsample_nearest(ops.squeeze(inputs, 2), wide), 2)
        inputs = _frame_by_frame(inputs)
        inputs = self.conv(inputs)
        inputs = _as_video(inputs, batch)
        del x_first, x_rest
        return inputs
