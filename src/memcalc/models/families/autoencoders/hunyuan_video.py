"""AutoencoderKLHunyuanVideo: convolutions that look back in time, over sixteen frames at a time.

Source: diffusers 0.42.1, models/autoencoders/autoencoder_kl_hunyuan_video.py.
"""

from __future__ import annotations

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.common.sizes import Shape
from memcalc.config.reader import Config
from memcalc.errors import ConfigError
from memcalc.models.common.autoencoder import Autoencoder, Half, Tiles, one_by_one, put_together, tiled
from memcalc.models.common.denoiser import Picture
from memcalc.models.families.autoencoders.hunyuan_video_blocks import (
    CausalConv3d,
    Downsample,
    Level,
    MidBlock,
    Upsample,
)
from memcalc.models.family import Family, table
from memcalc.nn.layers.diffusion import Convolution
from memcalc.nn.layers.diffusion_blocks import GroupNorm
from memcalc.nn.module import Module

_SIDE, _STEP, _FRAMES, _FRAME_STEP, _TIME, _SPACE = 256, 192, 16, 12, 4, 8
"""Pixels of a tile's side and from one to the next, the same of frames, and frames and pixels of a latent."""

_TIMES = (1, 2, 2, 0)
"""Frames that a change of resolution makes one of (or of one), by level; the last one changes nothing."""


def _down(channels: int, time: int) -> Module | None:
    return Downsample(channels, time) if time else None


def _up(channels: int, time: int) -> Module | None:
    return Upsample(channels, time) if time else None


class Half3D(Module):
    """The encoder or the decoder."""

    scope = "residual stream"

    def __init__(self, c: Config, *, encodes: bool) -> None:
        channels, groups = c.integers("block_out_channels"), c.integer("norm_num_groups")
        layers, latents = c.integer("layers_per_block"), c.integer("latent_channels")
        sizes = channels if encodes else channels[::-1]
        self.conv_in = CausalConv3d(c.integer("in_channels") if encodes else latents, sizes[0])
        middle = MidBlock(channels[-1], groups, attends=c.flag("mid_block_add_attention", True))
        before = (sizes[0], *sizes)
        if encodes:
            self.down_blocks = [
                Level(before[i], size, layers, groups, _down(size, _TIMES[i]), "downsamplers")
                for i, size in enumerate(sizes)
            ]
            self.mid_block = middle
        else:
            self.mid_block = middle
            self.up_blocks = [
                Level(before[i], size, layers + 1, groups, _up(size, _TIMES[i]), "upsamplers")
                for i, size in enumerate(sizes)
            ]
        self.conv_norm_out = GroupNorm(sizes[-1], groups)
        self.conv_out = CausalConv3d(sizes[-1], 2 * latents if encodes else c.integer("out_channels"))
        self.encodes = encodes

    def forward(self, hidden: Tensor) -> Tensor:
        """[b, c, t, h, w] to [b, c', t', h', w']."""
        hidden = self.conv_in(hidden)
        blocks = [*self.down_blocks, self.mid_block] if self.encodes else [self.mid_block, *self.up_blocks]
        for block in blocks:
            hidden = block(hidden)
        hidden = self.conv_norm_out(hidden)
        hidden = ops.silu(hidden)
        return self.conv_out(hidden)


class AutoencoderKLHunyuanVideo(Autoencoder):
    """The autoencoder of HunyuanVideo."""

    default_side = 720

    def __init__(self, c: Config) -> None:
        same = len(c.integers("block_out_channels")) == 4
        if (
            not same
            or c.integer("spatial_compression_ratio") != _SPACE
            or c.integer("temporal_compression_ratio") != _TIME
        ):
            raise ConfigError(f"{c.where} has other levels than four, or other compression ratios than 8 and 4.")
        self.latents = c.integer("latent_channels")
        self.encoder = Half3D(c, encodes=True)
        self.decoder = Half3D(c, encodes=False)
        self.quant_conv = Convolution(2 * self.latents, 2 * self.latents, 1, 1, 1)
        self.post_quant_conv = Convolution(self.latents, self.latents, 1, 1, 1)

    def latent_shape(self, picture: Picture) -> Shape:
        """[b, latents, t, h / 8, w / 8]."""
        sides = picture.height // _SPACE, picture.width // _SPACE
        return (picture.batch, self.latents, picture.latent_frames, *sides)

    def pixel_shape(self, picture: Picture) -> Shape:
        """[b, 3, frames, h, w]."""
        return (picture.batch, 3, picture.frames, picture.height, picture.width)

    def encoded(self, pixels: Tensor) -> Tensor:
        """[b, 3, frames, h, w] to [b, 2 · latents, t, h', w']."""
        blended, kept = (_SIDE - _STEP) // _SPACE, _STEP // _SPACE
        tiles, frames = Tiles(_SIDE, _STEP, blended, kept), Tiles(_FRAMES, _FRAME_STEP, 1, _FRAME_STEP // _TIME)
        return self._in_time(pixels, frames, lambda part: self._in_space(part, tiles, self._to_moments))

    def decoded(self, latents: Tensor) -> Tensor:
        """[b, latents, t, h, w] to [b, 3, frames, h', w']."""
        tiles = Tiles(_SIDE // _SPACE, _STEP // _SPACE, _SIDE - _STEP, _STEP)
        frames = Tiles(_FRAMES // _TIME, _FRAME_STEP // _TIME, _FRAMES - _FRAME_STEP, _FRAME_STEP)
        return self._in_time(latents, frames, lambda part: self._in_space(part, tiles, self._to_pixels))

    def _to_moments(self, pixels: Tensor) -> Tensor:
        return self.quant_conv(self.encoder(pixels))

    def _to_pixels(self, latents: Tensor) -> Tensor:
        tile = self.post_quant_conv(latents)  # it stays while it is decoded
        out: Tensor = self.decoder(tile)
        del tile
        return out

    def _in_space(self, x: Tensor, tiles: Tiles, half: Half) -> Tensor:
        return tiled(x, tiles, half) if self.tiling and max(x.shape[3:]) > tiles.side else half(x)

    def _in_time(self, x: Tensor, frames: Tiles, half: Half) -> Tensor:
        """What `half` makes of x, of `frames` and one more at a time."""
        length = x.shape[2]
        if length <= frames.side:
            return half(x)
        counts = [min(frames.side + 1, length - start) for start in range(0, length, frames.step)]

        def run(index: int) -> Tensor:
            made = half(ops.narrow(x, 2, counts[index]))
            return ops.narrow(made, 2, made.shape[2] - 1) if index else made

        row = one_by_one(x.tape, counts, run)
        return put_together(row, -3, frames, first=1)


DEFAULTS: dict[str, object] = {
    "in_channels": 3,
    "out_channels": 3,
    "latent_channels": 16,
    "block_out_channels": [128, 256, 512, 512],
    "layers_per_block": 2,
    "norm_num_groups": 32,
    "spatial_compression_ratio": 8,
    "temporal_compression_ratio": 4,
    "mid_block_add_attention": True,
}

FAMILIES = table(
    Family(
        "AutoencoderKLHunyuanVideo",
        lambda c, _: AutoencoderKLHunyuanVideo(c),
        DEFAULTS,
        blocks="encoder",
        attention="sdpa",
        supports="inference",
        verified="runs of diffusers on PyTorch's allocator, exact counts",
    )
)
