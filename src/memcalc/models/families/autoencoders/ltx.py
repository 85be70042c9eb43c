"""AutoencoderKLLTXVideo: latents of 32 pixels and eight frames, made and decoded at once.

Source: diffusers 0.42.1, models/autoencoders/autoencoder_kl_ltx.py.
"""

from __future__ import annotations

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.common.sizes import Shape
from memcalc.config.reader import Config
from memcalc.errors import ConfigError
from memcalc.models.common.autoencoder import Autoencoder, Tiles, tiled
from memcalc.models.common.denoiser import Picture
from memcalc.models.families.autoencoders.ltx_blocks import (
    CausalConv3d,
    DownBlock3D,
    Downsampler3d,
    MidBlock3d,
    NewDownBlock3D,
    Step,
    TimeEmbedder,
    UpBlock3d,
    Upsampler3d,
    channels_normalized,
    folded,
    shifts,
    unfolded,
)
from memcalc.models.family import Family, table
from memcalc.nn.layers.diffusion_norms import BareRMSNorm
from memcalc.nn.module import Buffer, Module, Parameter

_TILE, _STRIDE = 512, 448
"""Side of a tile in pixels, and from one to the next."""

_STEPS: dict[str, Step] = {"spatial": (1, 2, 2), "temporal": (2, 1, 1), "spatiotemporal": (2, 2, 2)}
"""Frames, rows and columns that a downsampler of LTX-Video 0.9.5 makes one of."""

_OLD, _NEW = "LTXVideoDownBlock3D", "LTXVideo095DownBlock3D"


class Encoder3d(Module):
    """Pixels to moments, of which the variances are one channel that is repeated."""

    scope = "residual stream"

    def __init__(self, c: Config, patch: Step) -> None:
        channels, latents = c.integers("block_out_channels", minimum=1), c.integer("latent_channels")
        causal = c.flag("encoder_causal")
        depths, scaled = c.integers("layers_per_block"), _flags(c, "spatio_temporal_scaling")
        kinds = [str(kind) for kind in c.items("down_block_types") or []]
        self.patch = patch
        self.conv_in = CausalConv3d(c.integer("in_channels") * patch[1] ** 2, channels[0], causal=causal)
        self.down_blocks: list[Module] = []
        if kinds[-1] == _NEW:
            outputs, downsamplers = channels[1:], [str(kind) for kind in c.items("downsample_type") or []]
        else:
            outputs, downsamplers = [*channels[1:], channels[-1]], []
        inputs = channels[0]
        for level, (size, depth, kind) in enumerate(zip(outputs, depths, kinds, strict=False)):
            if kind == _OLD:
                block: Module = DownBlock3D(inputs, size, depth, causal=causal, halves=scaled[level])
            else:
                made = _downsampler(c, inputs, size, downsamplers[level]) if scaled[level] else None
                block = NewDownBlock3D(inputs, depth, made, causal=causal)
            self.down_blocks.append(block)
            inputs = size
        self.mid_block = MidBlock3d(inputs, depths[-1], causal=causal)
        self.norm_out = BareRMSNorm()
        self.conv_out = CausalConv3d(inputs, latents + 1, causal=causal)

    def forward(self, hidden: Tensor) -> Tensor:
        """[b, c, t, h, w] to [b, 2 · latents, t', h', w']."""
        hidden = folded(hidden, self.patch)
        hidden = self.conv_in(hidden)
        for block in self.down_blocks:
            hidden = block(hidden)
        hidden = self.mid_block(hidden)
        hidden = channels_normalized(self.norm_out, hidden)
        hidden = ops.silu(hidden)
        hidden = self.conv_out(hidden)
        last = ops.narrow(hidden, 1, 1)
        last = ops.repeat(last, 1, hidden.shape[1] - 2)
        return ops.cat([hidden, last], 1)


class Decoder3d(Module):
    """Latents to pixels."""

    scope = "residual stream"

    def __init__(self, c: Config, patch: Step) -> None:
        channels = c.integers("decoder_block_out_channels", minimum=1)[::-1]
        depths, scaled = (
            c.integers("decoder_layers_per_block")[::-1],
            _flags(c, "decoder_spatio_temporal_scaling")[::-1],
        )
        noise, residual = _flags(c, "decoder_inject_noise")[::-1], _flags(c, "upsample_residual")[::-1]
        factors = c.integers("upsample_factor", minimum=1)[::-1]
        timed, causal = c.flag("timestep_conditioning"), c.flag("decoder_causal")
        self.patch = patch
        self.conv_in = CausalConv3d(c.integer("latent_channels"), channels[0], causal=causal)
        self.mid_block = MidBlock3d(channels[0], depths[0], causal=causal, noise=noise[0], timed=timed)
        self.up_blocks, size = [], channels[0]
        for level, outputs in enumerate(channels):
            factor = factors[level]
            inputs, size = size // factor, outputs // factor
            upsampler = (
                Upsampler3d(size * factor, factor, causal=causal, residual=residual[level]) if scaled[level] else None
            )
            depth, noisy = depths[level + 1], noise[level + 1]
            self.up_blocks.append(UpBlock3d(inputs, size, depth, upsampler, causal=causal, noise=noisy, timed=timed))
        self.norm_out = BareRMSNorm()
        self.conv_out = CausalConv3d(size, c.integer("out_channels") * patch[1] ** 2, causal=causal)
        self.timed = timed
        if timed:
            self.timestep_scale_multiplier = Parameter()
            self.time_embedder = TimeEmbedder(2 * size)
            self.scale_shift_table = Parameter(2, size)

    def forward(self, hidden: Tensor, temb: Tensor | None) -> Tensor:
        """[b, latents, t, h, w] and time steps [b], if it is told them, to [b, c, t', h', w']."""
        hidden = self.conv_in(hidden)
        if temb is not None:
            temb = ops.mul(temb, self.timestep_scale_multiplier)
        hidden = self.mid_block(hidden, temb)
        for block in self.up_blocks:
            hidden = block(hidden, temb)
        hidden = channels_normalized(self.norm_out, hidden)
        if temb is not None:
            temb = self.time_embedder(temb, hidden)
            shift, scale = shifts(temb, self.scale_shift_table, 2)
            hidden = ops.add(ops.mul(hidden, ops.add_scalar(scale)), shift)
        hidden = ops.silu(hidden)
        hidden = self.conv_out(hidden)
        return unfolded(hidden, self.patch)


def _flags(c: Config, key: str) -> list[bool]:
    return [bool(item) for item in c.items(key) or []]


def _downsampler(c: Config, inputs: int, outputs: int, kind: str) -> Module:
    causal = c.flag("encoder_causal")
    if kind == "conv":
        return CausalConv3d(inputs, inputs, causal=causal, stride=2)
    if kind not in _STEPS:
        raise ConfigError(f"{c.where} has a downsampler under 'downsample_type' that is not known: {kind}; correct it.")
    return Downsampler3d(inputs, outputs, _STEPS[kind], causal=causal)


class AutoencoderKLLTXVideo(Autoencoder):
    """The autoencoder of LTX-Video 0.9 to 0.9.8."""

    default_side = 512

    def __init__(self, c: Config) -> None:
        _check(c)
        patch: Step = (c.integer("patch_size_t"), c.integer("patch_size"), c.integer("patch_size"))
        halvings = sum(_flags(c, "spatio_temporal_scaling"))
        self.latents = c.integer("latent_channels")
        self.space = c.optional("spatial_compression_ratio") or patch[1] * 2**halvings
        self.time = c.optional("temporal_compression_ratio") or patch[0] * 2**halvings
        self.encoder = Encoder3d(c, patch)
        self.decoder = Decoder3d(c, patch)
        self.latents_mean, self.latents_std = (Buffer(self.latents, dtype=None) for _ in range(2))

    def latent_shape(self, picture: Picture) -> Shape:
        """[b, latents, t, h / 32, w / 32], of eight frames each but for the first."""
        sides = picture.height // self.space, picture.width // self.space
        return (picture.batch, self.latents, (picture.frames - 1) // self.time + 1, *sides)

    def pixel_shape(self, picture: Picture) -> Shape:
        """[b, 3, frames, h, w]."""
        return (picture.batch, 3, picture.frames, picture.height, picture.width)

    def encoded(self, pixels: Tensor) -> Tensor:
        """[b, 3, frames, h, w] to [b, 2 · latents, t, h', w']."""
        if self.tiling and max(pixels.shape[3:]) > _TILE:
            kept = _STRIDE // self.space
            return tiled(pixels, Tiles(_TILE, _STRIDE, _TILE // self.space - kept, kept), self.encoder)
        moments: Tensor = self.encoder(pixels)
        return moments

    def decoded(self, latents: Tensor) -> Tensor:
        """[b, latents, t, h, w] to [b, 3, frames, h', w']."""
        side, steps = _TILE // self.space, (latents.shape[0],)
        temb = latents.tape.empty(steps, latents.dtype) if self.decoder.timed else None
        if self.tiling and max(latents.shape[3:]) > side:
            tiles = Tiles(side, _STRIDE // self.space, _TILE - _STRIDE, _STRIDE)
            return tiled(latents, tiles, lambda tile: self.decoder(tile, temb))
        pixels: Tensor = self.decoder(latents, temb)
        return pixels


def _check(c: Config) -> None:
    """Raises ConfigError for lists that do not go together."""
    kinds = [str(kind) for kind in c.items("down_block_types") or []]
    levels = len(kinds)
    if not levels or set(kinds) - {_OLD, _NEW}:
        raise ConfigError(f"{c.where} has 'down_block_types' that memcalc does not describe: {', '.join(kinds)}.")
    up = len(c.items("decoder_block_out_channels") or [])
    lengths = {
        "block_out_channels": levels + (kinds[-1] == _NEW),
        "layers_per_block": levels + 1,
        "spatio_temporal_scaling": levels,
        "decoder_layers_per_block": up + 1,
        "decoder_spatio_temporal_scaling": up,
        "decoder_inject_noise": up + 1,
        "upsample_residual": up,
        "upsample_factor": up,
    }
    for key, length in lengths.items():
        found = len(c.items(key) or [])
        if found < max(length, 1):
            raise ConfigError(f"{c.where} gives {found} values for {key!r}, but {length} are needed; correct it.")


DEFAULTS: dict[str, object] = {
    "in_channels": 3,
    "out_channels": 3,
    "latent_channels": 128,
    "block_out_channels": [128, 256, 512, 512],
    "down_block_types": [_OLD] * 4,
    "decoder_block_out_channels": [128, 256, 512, 512],
    "layers_per_block": [4, 3, 3, 3, 4],
    "decoder_layers_per_block": [4, 3, 3, 3, 4],
    "spatio_temporal_scaling": [True, True, True, False],
    "decoder_spatio_temporal_scaling": [True, True, True, False],
    "decoder_inject_noise": [False] * 5,
    "downsample_type": ["conv"] * 4,
    "upsample_residual": [False] * 4,
    "upsample_factor": [1] * 4,
    "timestep_conditioning": False,
    "encoder_causal": True,
    "decoder_causal": False,
    "patch_size": 4,
    "patch_size_t": 1,
}

FAMILIES = table(
    Family(
        "AutoencoderKLLTXVideo",
        lambda c, _: AutoencoderKLLTXVideo(c),
        DEFAULTS,
        blocks="encoder",
        attention="sdpa",
        supports="inference",
        verified="runs of diffusers on PyTorch's allocator, exact counts",
    )
)
