"""AutoencoderKL: the autoencoder of Stable Diffusion, SDXL, SD3, FLUX.1, Z-Image and others; AutoencoderKLFlux2.

Source: diffusers 0.42.1, models/autoencoders/{autoencoder_kl,autoencoder_kl_flux2,vae}.py, unets/unet_2d_blocks.py.
"""

from __future__ import annotations

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.common.sizes import Shape
from memcalc.config.reader import Config
from memcalc.errors import ConfigError
from memcalc.models.common.autoencoder import Autoencoder, Tiles, tiled
from memcalc.models.common.denoiser import Picture
from memcalc.models.family import Family, table
from memcalc.nn.layers.diffusion import Convolution, NoDropout
from memcalc.nn.layers.diffusion_blocks import GroupNorm, Resample, ResnetBlock2D
from memcalc.nn.layers.linear import Linear
from memcalc.nn.module import Buffer, Module
from memcalc.tables.dtypes import INT64


class PixelAttention(Module):
    """Attention of one head over all pixels, behind a group norm."""

    scope = "attention"

    def __init__(self, channels: int, groups: int) -> None:
        self.group_norm = GroupNorm(channels, groups)
        self.to_q = Linear(channels, channels, bias=True)
        self.to_k = Linear(channels, channels, bias=True)
        self.to_v = Linear(channels, channels, bias=True)
        self.to_out = [Linear(channels, channels, bias=True), NoDropout()]

    def forward(self, hidden: Tensor) -> Tensor:
        """[b, c, h, w] to the same."""
        residual = hidden
        batch, channels, height, width = hidden.shape
        hidden = ops.transpose(ops.view(hidden, batch, channels, height * width), 1, 2)
        hidden = ops.transpose(self.group_norm(ops.transpose(hidden, 1, 2)), 1, 2)
        query = self.to_q(hidden)
        encoder = hidden
        key = self.to_k(encoder)
        value = self.to_v(encoder)
        query = ops.transpose(ops.view(query, batch, -1, 1, channels), 1, 2)
        key = ops.transpose(ops.view(key, batch, -1, 1, channels), 1, 2)
        value = ops.transpose(ops.view(value, batch, -1, 1, channels), 1, 2)
        hidden = ops.scaled_dot_product_attention(query, key, value)
        hidden = ops.reshape(ops.transpose(hidden, 1, 2), batch, -1, channels)
        hidden = ops.to(hidden, query.dtype)
        hidden = self.to_out[0](hidden)
        hidden = ops.reshape(ops.transpose(hidden, -1, -2), batch, channels, height, width)
        hidden = ops.add(hidden, residual)
        return ops.mul_scalar(hidden)


class MidBlock(Module):
    """A resnet, attention where there is one, and a resnet."""

    scope = "mid block"

    def __init__(self, channels: int, groups: int, *, attends: bool) -> None:
        self.attentions = [PixelAttention(channels, groups)] if attends else []
        self.resnets = [ResnetBlock2D(channels, channels, None, groups) for _ in range(2)]

    def forward(self, hidden: Tensor) -> Tensor:
        """[b, c, h, w] to the same."""
        hidden = self.resnets[0](hidden, None)
        for attention in self.attentions:
            hidden = attention(hidden)
        return self.resnets[1](hidden, None)


class PaddedDownsample(Module):
    """A convolution that halves each side, behind a row and a column of zeros."""

    scope = "resampling"

    def __init__(self, channels: int) -> None:
        self.conv = Convolution(channels, channels, 3, 3, stride=2)

    def forward(self, hidden: Tensor) -> Tensor:
        """[b, c, h, w] to [b, c, h / 2, w / 2]."""
        hidden = ops.pad(hidden, 3, 1, (2, 1))
        return self.conv(hidden)


class Level(Module):
    """Resnets, and a change of resolution where there is one: DownEncoderBlock2D, UpDecoderBlock2D."""

    scope = "residual stream"

    def __init__(self, inputs: int, outputs: int, depth: int, groups: int, resampler: Module | None, name: str) -> None:
        self.resnets = [ResnetBlock2D(outputs if i else inputs, outputs, None, groups) for i in range(depth)]
        if resampler is not None:
            setattr(self, name, [resampler])
        self.resampler_name = "" if resampler is None else name

    def forward(self, hidden: Tensor) -> Tensor:
        """[b, inputs, h, w] to [b, outputs, h', w']."""
        for resnet in self.resnets:
            hidden = resnet(hidden, None)
        if self.resampler_name:
            (resampler,) = getattr(self, self.resampler_name)
            hidden = resampler(hidden)
        return hidden


class Encoder(Module):
    """Pixels to moments."""

    scope = "residual stream"

    def __init__(self, c: Config, channels: list[int]) -> None:
        groups, last = c.integer("norm_num_groups"), len(channels) - 1
        self.conv_in = Convolution(c.integer("in_channels"), channels[0], 3, 3, padding=1)
        before = (channels[0], *channels)
        self.down_blocks = [
            Level(
                before[level],
                size,
                c.integer("layers_per_block"),
                groups,
                PaddedDownsample(size) if level < last else None,
                "downsamplers",
            )
            for level, size in enumerate(channels)
        ]
        self.mid_block = MidBlock(channels[-1], groups, attends=c.flag("mid_block_add_attention", True))
        self.conv_norm_out = GroupNorm(channels[-1], groups)
        self.conv_out = Convolution(channels[-1], 2 * c.integer("latent_channels"), 3, 3, padding=1)

    def forward(self, sample: Tensor) -> Tensor:
        """[b, c, h, w] to [b, 2 · latents, h', w']."""
        sample = self.conv_in(sample)
        for block in self.down_blocks:
            sample = block(sample)
        sample = self.mid_block(sample)
        sample = self.conv_norm_out(sample)
        sample = ops.silu(sample)
        return self.conv_out(sample)


class Decoder(Module):
    """Latents to pixels."""

    scope = "residual stream"

    def __init__(self, c: Config, channels: list[int]) -> None:
        groups, last = c.integer("norm_num_groups"), len(channels) - 1
        sizes = channels[::-1]
        self.conv_in = Convolution(c.integer("latent_channels"), sizes[0], 3, 3, padding=1)
        before = (sizes[0], *sizes)
        self.up_blocks = [
            Level(
                before[level],
                size,
                c.integer("layers_per_block") + 1,
                groups,
                Resample(size, down=False) if level < last else None,
                "upsamplers",
            )
            for level, size in enumerate(sizes)
        ]
        self.mid_block = MidBlock(sizes[0], groups, attends=c.flag("mid_block_add_attention", True))
        self.conv_norm_out = GroupNorm(channels[0], groups)
        self.conv_out = Convolution(channels[0], c.integer("out_channels"), 3, 3, padding=1)

    def forward(self, sample: Tensor) -> Tensor:
        """[b, latents, h, w] to [b, c, h', w']."""
        sample = self.conv_in(sample)
        sample = self.mid_block(sample)
        for block in self.up_blocks:
            sample = block(sample)
        sample = self.conv_norm_out(sample)
        sample = ops.silu(sample)
        return self.conv_out(sample)


class AutoencoderKL(Autoencoder):
    """The autoencoder of pictures. `normalized`: latents have a batch norm of 2x2 squares, which is only buffers."""

    def __init__(self, c: Config, *, normalized: bool = False) -> None:
        for key, kind in (("down_block_types", "DownEncoderBlock2D"), ("up_block_types", "UpDecoderBlock2D")):
            if any(name != kind for name in c.items(key) or []):
                raise ConfigError(f"{c.where} has blocks under '{key}' that memcalc does not describe: {c.get(key)}.")
        channels = c.integers("block_out_channels")
        self.latents, self.ratio = c.integer("latent_channels"), 2 ** (len(channels) - 1)
        sides = c.items("sample_size") if isinstance(c.get("sample_size"), (list, tuple)) else None
        self.default_side = c.integer("sample_size") if sides is None else int(str(sides[0]))
        self.force_upcast = c.flag("force_upcast", True)
        self.encoder = Encoder(c, channels)
        self.decoder = Decoder(c, c.integers("decoder_block_out_channels") or channels)
        latents = self.latents
        self.quant_conv = Convolution(2 * latents, 2 * latents, 1, 1) if c.flag("use_quant_conv", True) else None
        self.post_quant_conv = Convolution(latents, latents, 1, 1) if c.flag("use_post_quant_conv", True) else None
        if normalized:
            self.bn = LatentNorm(4 * latents)

    def latent_shape(self, picture: Picture) -> Shape:
        """[b, latents, h, w]."""
        return (picture.batch, self.latents, picture.height // self.ratio, picture.width // self.ratio)

    def encoded(self, pixels: Tensor) -> Tensor:
        """[b, c, h, w] to [b, 2 · latents, h', w']."""
        side, latent = self.default_side, self.default_side // self.ratio
        if self.tiling and max(pixels.shape[2:]) > side:
            blended = int(latent * 0.25)
            return tiled(pixels, Tiles(side, int(side * 0.75), blended, latent - blended), self._encoded)
        return self._encoded(pixels)

    def decoded(self, latents: Tensor) -> Tensor:
        """[b, latents, h, w] to [b, c, h', w']."""
        side, latent = self.default_side, self.default_side // self.ratio
        if self.tiling and max(latents.shape[2:]) > latent:
            blended = int(side * 0.25)
            return tiled(latents, Tiles(latent, int(latent * 0.75), blended, side - blended), self._decoded)
        return self._decoded(latents)

    def _encoded(self, pixels: Tensor) -> Tensor:
        encoded: Tensor = self.encoder(pixels)
        if self.quant_conv is not None:
            encoded = self.quant_conv(encoded)
        return encoded

    def _decoded(self, latents: Tensor) -> Tensor:
        if self.post_quant_conv is not None:
            latents = self.post_quant_conv(latents)
        return self.decoder(latents)


class LatentNorm(Module):
    """Running statistics of latents (torch.nn.BatchNorm2d without weights); the pipeline reads them alone."""

    def __init__(self, channels: int) -> None:
        self.running_mean = Buffer(channels, dtype=None)
        self.running_var = Buffer(channels, dtype=None)
        self.num_batches_tracked = Buffer(dtype=INT64)


DEFAULTS: dict[str, object] = {
    "in_channels": 3,
    "out_channels": 3,
    "down_block_types": ["DownEncoderBlock2D"],
    "up_block_types": ["UpDecoderBlock2D"],
    "block_out_channels": [64],
    "layers_per_block": 1,
    "latent_channels": 4,
    "norm_num_groups": 32,
    "sample_size": 32,
    "mid_block_add_attention": True,
    "decoder_block_out_channels": [],
}
FLUX2 = DEFAULTS | {
    "down_block_types": ["DownEncoderBlock2D"] * 4,
    "up_block_types": ["UpDecoderBlock2D"] * 4,
    "block_out_channels": [128, 256, 512, 512],
    "layers_per_block": 2,
    "latent_channels": 32,
    "sample_size": 1024,
}

FAMILIES = table(
    *(
        Family(
            name,
            lambda c, _, normalized=normalized: AutoencoderKL(c, normalized=normalized),  # type: ignore[misc]
            defaults,
            blocks="encoder",
            attention="sdpa",
            supports="inference",
            verified="runs of diffusers on PyTorch's allocator, exact counts",
        )
        for name, defaults, normalized in (("AutoencoderKL", DEFAULTS, False), ("AutoencoderKLFlux2", FLUX2, True))
    )
)
