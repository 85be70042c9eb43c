"""AutoencoderKLWan (Wan 2.1) and AutoencoderKLQwenImage: causal convolutions that see a video a few frames at a time.

Source: diffusers 0.42.1, models/autoencoders/{autoencoder_kl_wan,autoencoder_kl_qwenimage}.py.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.common.sizes import Shape
from memcalc.config.reader import Config
from memcalc.errors import ConfigError
from memcalc.models.common.autoencoder import Autoencoder, Tiles, tiled
from memcalc.models.common.denoiser import Picture
from memcalc.models.family import Family, table
from memcalc.nn.layers.causal_video import Caches, CausalConv3d, ChannelNorm, FrameAttention, Resample, ResidualBlock
from memcalc.nn.module import Module


class MidBlock(Module):
    """A residual block, attention, and a residual block."""

    scope = "mid block"

    def __init__(self, width: int) -> None:
        self.attentions = [FrameAttention(width)]
        self.resnets = [ResidualBlock(width, width) for _ in range(2)]

    def forward(self, x: Tensor, caches: Caches) -> Tensor:
        """[b, c, t, h, w] to the same."""
        x = self.resnets[0](x, caches)
        x = self.attentions[0](x, caches)
        return self.resnets[1](x, caches)


class UpBlock(Module):
    """Residual blocks, and an upsampler where there is one."""

    scope = "residual stream"

    def __init__(self, inputs: int, outputs: int, depth: int, upsampler: Module | None) -> None:
        self.resnets = [ResidualBlock(outputs if i else inputs, outputs) for i in range(depth)]
        self.upsamplers = [] if upsampler is None else [upsampler]

    def forward(self, x: Tensor, caches: Caches) -> Tensor:
        """[b, inputs, t, h, w] to [b, outputs, t', h', w']."""
        for resnet in self.resnets:
            x = resnet(x, caches)
        for upsampler in self.upsamplers:
            x = upsampler(x, caches)
        return x


class Encoder(Module):
    """Some frames at a time to moments."""

    scope = "residual stream"

    def __init__(self, c: Config, dims: list[int], timed: list[bool]) -> None:
        self.conv_in = CausalConv3d(c.integer("in_channels"), dims[0], 3, 3, 3, padding=(1, 1))
        blocks: list[Module] = []
        for level, (inputs, outputs) in enumerate(pairwise(dims)):
            depth = range(c.integer("num_res_blocks"))
            blocks += [ResidualBlock(outputs if i else inputs, outputs) for i in depth]
            if level < len(timed):
                blocks.append(Resample(outputs, down=True, timed=timed[level]))
        self.down_blocks = blocks
        self.mid_block = MidBlock(dims[-1])
        self.norm_out = ChannelNorm(dims[-1], 3)
        self.conv_out = CausalConv3d(dims[-1], 2 * c.integer("z_dim"), 3, 3, 3, padding=(1, 1))

    def forward(self, x: Tensor, caches: Caches) -> Tensor:
        """[b, c, t, h, w] to [b, 2 z, t', h', w']."""
        x = self.conv_in.cached(x, caches)
        for block in self.down_blocks:
            x = block(x, caches)
        x = self.mid_block(x, caches)
        x = self.norm_out(x)
        x = ops.silu(x)
        return self.conv_out.cached(x, caches)


class Decoder(Module):
    """Some latents at a time to frames."""

    scope = "residual stream"

    def __init__(self, c: Config, dims: list[int], timed: list[bool]) -> None:
        self.conv_in = CausalConv3d(c.integer("z_dim"), dims[0], 3, 3, 3, padding=(1, 1))
        self.mid_block = MidBlock(dims[0])
        depth = c.integer("num_res_blocks") + 1
        self.up_blocks = [
            UpBlock(
                inputs // 2 if level else inputs,
                outputs,
                depth,
                Resample(outputs, down=False, timed=timed[level]) if level < len(timed) else None,
            )
            for level, (inputs, outputs) in enumerate(pairwise(dims))
        ]
        self.norm_out = ChannelNorm(dims[-1], 3)
        self.conv_out = CausalConv3d(dims[-1], c.integer("out_channels"), 3, 3, 3, padding=(1, 1))

    def forward(self, x: Tensor, caches: Caches) -> Tensor:
        """[b, z, t, h, w] to [b, c, t', h', w']."""
        x = self.conv_in.cached(x, caches)
        x = self.mid_block(x, caches)
        for block in self.up_blocks:
            x = block(x, caches)
        x = self.norm_out(x)
        x = ops.silu(x)
        return self.conv_out.cached(x, caches)


class AutoencoderKLWan(Autoencoder):
    """The autoencoder of Wan 2.1 and of Qwen-Image."""

    default_side = 480

    def __init__(self, c: Config) -> None:
        if c.flag("is_residual") or c.optional("patch_size") is not None or c.items("attn_scales"):
            raise ConfigError(f"{c.where} is of Wan 2.2's autoencoder, which memcalc does not describe.")
        factors, timed = (
            c.integers("dim_mult", minimum=1),
            [bool(part) for part in c.items("temperal_downsample") or []],
        )
        base, self.latents = c.integer("base_dim"), c.integer("z_dim")
        decoder = c.optional("decoder_base_dim") or base
        self.encoder = Encoder(c, [base * factor for factor in (1, *factors)], timed)
        self.quant_conv = CausalConv3d(2 * self.latents, 2 * self.latents, 1, 1, 1)
        self.post_quant_conv = CausalConv3d(self.latents, self.latents, 1, 1, 1)
        self.decoder = Decoder(c, [decoder * factor for factor in (factors[-1], *factors[::-1])], timed[::-1])

    def latent_shape(self, picture: Picture) -> Shape:
        """[b, z, t, h / 8, w / 8]."""
        sides = picture.height // _RATIO, picture.width // _RATIO
        return (picture.batch, self.latents, picture.latent_frames, *sides)

    def pixel_shape(self, picture: Picture) -> Shape:
        """[b, 3, frames, h, w]."""
        return (picture.batch, 3, picture.frames, picture.height, picture.width)

    def encoded(self, pixels: Tensor) -> Tensor:
        """[b, c, frames, h, w] to [b, 2 z, t, h', w']."""
        if self.tiling and max(pixels.shape[3:]) > _TILE:
            stride, ratio = _STRIDE, _RATIO
            tiles = Tiles(_TILE, stride, (_TILE - stride) // ratio, stride // ratio)
            return tiled(pixels, tiles, self._encoded_tile)
        caches: Caches = {}
        out = _in_turn(pixels, 4, lambda part: self.encoder(part, caches))
        return self.quant_conv(out)

    def decoded(self, latents: Tensor) -> Tensor:
        """[b, z, t, h, w] to [b, c, frames, h', w']."""
        if self.tiling and max(latents.shape[3:]) > _TILE // _RATIO:
            tiles = Tiles(_TILE // _RATIO, _STRIDE // _RATIO, _TILE - _STRIDE, _STRIDE)
            last: list[Tensor] = []  # the frames that were decoded last stay until there are others
            return ops.clamp(tiled(latents, tiles, lambda tile: self._decoded_tile(tile, last)))
        caches: Caches = {}
        x = self.post_quant_conv(latents)
        out = _in_turn(x, 1, lambda part: self.decoder(part, caches))
        return ops.clamp(out)

    def _encoded_tile(self, pixels: Tensor) -> Tensor:
        caches: Caches = {}
        parts = _one_after_another(pixels, 4, lambda part: self.quant_conv(self.encoder(part, caches)))
        return ops.cat(parts, 2)

    def _decoded_tile(self, latents: Tensor, last: list[Tensor]) -> Tensor:
        caches: Caches = {}

        def half(part: Tensor) -> Tensor:
            decoded: Tensor = self.decoder(self.post_quant_conv(part), caches)
            last[:] = [decoded]
            return decoded

        return ops.cat(_one_after_another(latents, 1, half), 2)


_RATIO, _TILE, _STRIDE = 8, 256, 192
"""Pixels of a latent; side of a tile in pixels, and from one to the next."""

_ALIKE = 3
"""Parts of a video from which on each is worked on as the one before."""


def _parts(x: Tensor, step: int) -> list[Tensor]:
    """The first frame, and then `step` frames at a time."""
    count = 1 + (x.shape[2] - 1) // step
    return [ops.narrow(x, 2, step if index else 1) for index in range(count)]


def _in_turn(x: Tensor, step: int, half: Callable[[Tensor], Tensor]) -> Tensor:
    """What `half` makes of the parts, each put behind what there is already."""
    first, *rest = _parts(x, step)
    out = half(first)
    made = out
    for index, part in enumerate(rest, 1):
        if _ALIKE <= index < len(rest):  # as the one before, beside less
            frames = out.shape[2] + made.shape[2]
            out = x.tape.empty((*out.shape[:2], frames, *out.shape[3:]), out.dtype)
            continue
        made = half(part)
        out = ops.cat([out, made], 2)
    return out


def _one_after_another(x: Tensor, step: int, half: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """What `half` makes of every part."""
    made: list[Tensor] = []
    parts = _parts(x, step)
    for index, part in enumerate(parts):
        alike = _ALIKE <= index < len(parts) - 1
        made.append(x.tape.empty(made[-1].shape, made[-1].dtype) if alike else half(part))
    return made


DEFAULTS: dict[str, object] = {
    "base_dim": 96,
    "decoder_base_dim": None,
    "z_dim": 16,
    "dim_mult": [1, 2, 4, 4],
    "num_res_blocks": 2,
    "attn_scales": [],
    "temperal_downsample": [False, True, True],
    "in_channels": 3,
    "out_channels": 3,
    "patch_size": None,
}

FAMILIES = table(
    *(
        Family(
            name,
            lambda c, _: AutoencoderKLWan(c),
            DEFAULTS,
            {"input_channels": "in_channels"},
            blocks="encoder",
            attention="sdpa",
            supports="inference",
            verified="runs of diffusers on PyTorch's allocator, exact counts",
        )
        for name in ("AutoencoderKLWan", "AutoencoderKLQwenImage")
    )
)
