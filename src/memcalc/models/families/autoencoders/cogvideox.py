"""AutoencoderKLCogVideoX: latents of eight pixels and four frames, some frames at a time.

Source: diffusers 0.42.1, models/autoencoders/autoencoder_kl_cogvideox.py.
"""

from __future__ import annotations

from collections.abc import Callable

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.common.sizes import Shape
from memcalc.config.reader import Config
from memcalc.errors import ConfigError
from memcalc.models.common.autoencoder import Autoencoder, Tiles, one_by_one, tiled
from memcalc.models.common.denoiser import Picture
from memcalc.models.families.autoencoders.cogvideox_blocks import (
    Caches,
    CausalConv3d,
    Downsample3D,
    ResnetBlock3D,
    SpatialNorm3D,
    Upsample3D,
    normed,
)
from memcalc.models.family import Family, table
from memcalc.nn.layers.diffusion_blocks import GroupNorm
from memcalc.nn.module import Module

_SAMPLES, _LATENTS, _TIME = 8, 2, 4
"""Frames and latents of frames that are worked on at a time, and frames of a latent."""

_OVERLAPS = (1 / 6, 1 / 5)
"""Parts of a tile's height and width that its neighbours share."""


class Level(Module):
    """Resnets, and a change of resolution where there is one, under `name`."""

    scope = "residual stream"

    def __init__(self, resnets: list[ResnetBlock3D], resampler: Module | None = None, name: str = "") -> None:
        self.resnets = resnets
        self.resampler = [] if resampler is None else [resampler]
        if resampler is not None:
            setattr(self, name, self.resampler)

    def forward(self, hidden: Tensor, zq: Tensor | None, caches: Caches) -> Tensor:
        """[b, inputs, t, h, w] to [b, outputs, t', h', w']."""
        for resnet in self.resnets:
            hidden = resnet(hidden, zq, caches)
        for resampler in self.resampler:
            hidden = resampler(hidden)
        return hidden


class Half3D(Module):
    """The encoder, or the decoder, whose norms look at the latents."""

    scope = "residual stream"

    def __init__(self, c: Config, timed: int, *, encodes: bool) -> None:
        channels, groups = c.integers("block_out_channels", minimum=1), c.integer("norm_num_groups")
        depth, latents = c.integer("layers_per_block"), c.integer("latent_channels")
        sizes, seen = (channels, None) if encodes else (channels[::-1], latents)
        self.conv_in = CausalConv3d(c.integer("in_channels") if encodes else latents, sizes[0])
        middle = Level([ResnetBlock3D(channels[-1], channels[-1], groups, seen) for _ in range(2)])
        levels, inputs = [], sizes[0]
        for level, size in enumerate(sizes):
            count = depth if encodes else depth + 1
            resnets = [ResnetBlock3D(size if i else inputs, size, groups, seen) for i in range(count)]
            last = level == len(sizes) - 1
            if encodes:
                down = None if last else Downsample3D(size, timed=level < timed)
                levels.append(Level(resnets, down, "downsamplers"))
            else:
                up = None if last else Upsample3D(size, timed=level < timed)
                levels.append(Level(resnets, up, "upsamplers"))
            inputs = size
        if encodes:
            self.down_blocks = levels
        self.mid_block = middle
        if not encodes:
            self.up_blocks = levels
        self.norm_out = GroupNorm(inputs, groups) if encodes else SpatialNorm3D(inputs, latents, groups)
        self.conv_out = CausalConv3d(inputs, 2 * latents if encodes else c.integer("out_channels"))
        self.encodes = encodes

    def forward(self, sample: Tensor, caches: Caches) -> Tensor:
        """[b, c, t, h, w] to [b, c', t', h', w']."""
        zq = None if self.encodes else sample
        hidden = self.conv_in(sample, caches)
        blocks = [*self.down_blocks, self.mid_block] if self.encodes else [self.mid_block, *self.up_blocks]
        for block in blocks:
            hidden = block(hidden, zq, caches)
        hidden = normed(self.norm_out, hidden, zq, caches)
        hidden = ops.silu(hidden)
        return self.conv_out(hidden, caches)


class AutoencoderKLCogVideoX(Autoencoder):
    """The autoencoder of CogVideoX."""

    default_side = 480

    def __init__(self, c: Config) -> None:
        if (
            c.flag("use_quant_conv")
            or c.flag("use_post_quant_conv")
            or c.integer("temporal_compression_ratio") != _TIME
        ):
            raise ConfigError(
                f"{c.where} has convolutions beside its halves ('use_quant_conv'), or another "
                "'temporal_compression_ratio' than 4, which memcalc does not describe."
            )
        self.latents, levels = c.integer("latent_channels"), len(c.integers("block_out_channels"))
        self.ratio = 2 ** (levels - 1)
        self.tile = c.integer("sample_height", minimum=2) // 2, c.integer("sample_width", minimum=2) // 2
        self.encoder = Half3D(c, 2, encodes=True)
        self.decoder = Half3D(c, 2, encodes=False)

    def latent_shape(self, picture: Picture) -> Shape:
        """[b, latents, t, h / 8, w / 8]."""
        sides = picture.height // self.ratio, picture.width // self.ratio
        return (picture.batch, self.latents, picture.latent_frames, *sides)

    def pixel_shape(self, picture: Picture) -> Shape:
        """[b, 3, frames, h, w]."""
        return (picture.batch, 3, picture.frames, picture.height, picture.width)

    def encoded(self, pixels: Tensor) -> Tensor:
        """[b, 3, frames, h, w] to [b, 2 · latents, t, h', w']."""
        tiles = [
            Tiles(side, int(side * (1 - part)), int(side // self.ratio * part), 0)
            for side, part in zip(self.tile, _OVERLAPS, strict=True)
        ]
        return self._run(pixels, self.encoder, _SAMPLES, tiles, [side // self.ratio for side in self.tile])

    def decoded(self, latents: Tensor) -> Tensor:
        """[b, latents, t, h, w] to [b, 3, frames, h', w']."""
        tiles = [
            Tiles(side // self.ratio, int(side // self.ratio * (1 - part)), int(side * part), 0)
            for side, part in zip(self.tile, _OVERLAPS, strict=True)
        ]
        return self._run(latents, self.decoder, _LATENTS, tiles, list(self.tile))

    def _run(self, x: Tensor, half: Module, step: int, tiles: list[Tiles], made: list[int]) -> Tensor:
        """What `half` makes of x, `step` frames at a time, in `tiles` that give `made` of each side where it is on."""
        left: list[object] = []
        rows, columns = (
            Tiles(part.side, part.step, part.blended, size - part.blended)
            for part, size in zip(tiles, made, strict=True)
        )
        if self.tiling and (x.shape[3] > rows.side or x.shape[4] > columns.side):
            return tiled(x, rows, lambda tile: _in_turn(tile, half, step, left), across=columns)
        return _in_turn(x, half, step, left)


def _in_turn(x: Tensor, half: Callable[..., Tensor], step: int, left: list[object]) -> Tensor:
    """What `half` makes of some frames at a time, the first time of the rest too.

    `left`: what stays until the next call, as the parts and the caches do that a loop of tiles leaves behind.
    """
    left.clear()
    frames, caches = x.shape[2], Caches()
    count = max(frames // step, 1)
    lengths = [min(step + frames % step, frames), *(step for _ in range(count - 1))]

    def run(index: int) -> Tensor:
        made = half(ops.narrow(x, 2, lengths[index]), caches)
        caches.turn()
        return made

    parts = one_by_one(x.tape, lengths, run)
    left[:] = [parts, caches]
    return ops.cat(parts, 2)


DEFAULTS: dict[str, object] = {
    "in_channels": 3,
    "out_channels": 3,
    "block_out_channels": [128, 256, 256, 512],
    "latent_channels": 16,
    "layers_per_block": 3,
    "norm_num_groups": 32,
    "temporal_compression_ratio": 4,
    "sample_height": 480,
    "sample_width": 720,
}

FAMILIES = table(
    Family(
        "AutoencoderKLCogVideoX",
        lambda c, _: AutoencoderKLCogVideoX(c),
        DEFAULTS,
        blocks="encoder",
        attention="sdpa",
        supports="inference",
        verified="runs of diffusers on PyTorch's allocator, exact counts",
    )
)
