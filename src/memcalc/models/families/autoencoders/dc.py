"""AutoencoderDC: Sana's autoencoder, one latent for 32 x 32 pixels, with linear attention on its deep levels.

Source: diffusers 0.42.1, models/autoencoders/autoencoder_dc.py.
"""

from __future__ import annotations

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.common.sizes import Shape
from memcalc.config.reader import Config
from memcalc.errors import ConfigError
from memcalc.models.common.autoencoder import Autoencoder, Tiles, tiled
from memcalc.models.common.denoiser import Picture
from memcalc.models.families.autoencoders.dc_blocks import (
    DownBlock,
    Level,
    UpBlock,
    averaged,
    channels_first,
    channels_last,
    levels,
    repeated,
)
from memcalc.models.family import Family, table
from memcalc.nn.layers.diffusion import Convolution
from memcalc.nn.layers.diffusion_norms import EagerRMSNorm
from memcalc.nn.module import Module

_TILE, _STRIDE = 512, 448
"""Side of a tile in pixels, and from one to the next."""


class Encoder(Module):
    """Pixels to latents."""

    scope = "residual stream"

    def __init__(self, c: Config) -> None:
        channels, self.latents = c.integers("encoder_block_out_channels"), c.integer("latent_channels")
        unshuffles = c.get("downsample_block_type") == "pixel_unshuffle"
        self.conv_in = Convolution(c.integer("in_channels"), channels[0], 3, 3, padding=1)
        blocks = levels(c, "encoder")
        for level, size in enumerate(channels[1:]):
            blocks[level].append(DownBlock(channels[level], size, unshuffles=unshuffles))
        self.down_blocks = [Level(level) for level in blocks]
        self.conv_out = Convolution(channels[-1], self.latents, 3, 3, padding=1)
        self.shortcut = c.flag("encoder_out_shortcut", True)

    def forward(self, hidden: Tensor) -> Tensor:
        """[b, c, h, w] to [b, latents, h', w']."""
        hidden = self.conv_in(hidden)
        for block in self.down_blocks:
            hidden = block(hidden)
        if not self.shortcut:
            return self.conv_out(hidden)
        x = averaged(hidden, self.latents)
        return ops.add(self.conv_out(hidden), x)


class Decoder(Module):
    """Latents to pixels."""

    scope = "residual stream"

    def __init__(self, c: Config) -> None:
        channels = c.integers("decoder_block_out_channels")
        self.conv_in = Convolution(c.integer("latent_channels"), channels[-1], 3, 3, padding=1)
        self.first, self.shortcut = channels[-1], c.flag("decoder_in_shortcut", True)
        interpolates = c.get("upsample_block_type") == "interpolate"
        blocks = levels(c, "decoder")
        for level, size in enumerate(channels[:-1]):
            blocks[level].insert(0, UpBlock(channels[level + 1], size, interpolates=interpolates))
        self.up_blocks = [Level(level) for level in blocks]
        self.norm_out = EagerRMSNorm(channels[0], bias=True)
        self.conv_out = Convolution(channels[0], c.integer("in_channels"), 3, 3, padding=1)
        if c.get("decoder_conv_act_fn") != "relu":
            raise ConfigError(f"{c.where} ends in another activation under 'decoder_conv_act_fn' than relu.")

    def forward(self, hidden: Tensor) -> Tensor:
        """[b, latents, h, w] to [b, c, h', w']."""
        if self.shortcut:
            x = repeated(hidden, self.first)
            hidden = ops.add(self.conv_in(hidden), x)
        else:
            hidden = self.conv_in(hidden)
        for block in reversed(self.up_blocks):
            hidden = block(hidden)
        hidden = channels_first(self.norm_out(channels_last(hidden)))
        hidden = ops.relu(hidden)
        return self.conv_out(hidden)


class AutoencoderDC(Autoencoder):
    """Sana's autoencoder, which gives latents themselves and no distribution of them."""

    default_side = 1024

    def __init__(self, c: Config) -> None:
        self.latents = c.integer("latent_channels")
        self.ratio = 2 ** (len(c.integers("encoder_block_out_channels")) - 1)
        self.encoder = Encoder(c)
        self.decoder = Decoder(c)

    def latent_shape(self, picture: Picture) -> Shape:
        """[b, latents, h, w]."""
        return (picture.batch, self.latents, picture.height // self.ratio, picture.width // self.ratio)

    def encode(self, pixels: Tensor) -> Tensor:
        """The latents of `pixels`."""
        return self.in_slices(pixels, self.encoded)

    def encoded(self, pixels: Tensor) -> Tensor:
        """[b, c, h, w] to [b, latents, h', w']."""
        if self.tiling and max(pixels.shape[2:]) > _TILE:
            blended, kept = (_TILE - _STRIDE) // self.ratio, _STRIDE // self.ratio
            return tiled(pixels, Tiles(_TILE, _STRIDE, blended, kept), self.encoder)
        return self.encoder(pixels)

    def decoded(self, latents: Tensor) -> Tensor:
        """[b, latents, h, w] to [b, c, h', w']."""
        side, step = _TILE // self.ratio, _STRIDE // self.ratio
        if self.tiling and max(latents.shape[2:]) > side:
            return tiled(latents, Tiles(side, step, _TILE - _STRIDE, _STRIDE), self.decoder)
        return self.decoder(latents)


DEFAULTS: dict[str, object] = {
    "in_channels": 3,
    "latent_channels": 32,
    "attention_head_dim": 32,
    "encoder_block_types": "ResBlock",
    "decoder_block_types": "ResBlock",
    "encoder_block_out_channels": [128, 256, 512, 512, 1024, 1024],
    "decoder_block_out_channels": [128, 256, 512, 512, 1024, 1024],
    "encoder_layers_per_block": [2, 2, 2, 3, 3, 3],
    "decoder_layers_per_block": [3, 3, 3, 3, 3, 3],
    "encoder_qkv_multiscales": [[], [], [], [5], [5], [5]],
    "decoder_qkv_multiscales": [[], [], [], [5], [5], [5]],
    "upsample_block_type": "pixel_shuffle",
    "downsample_block_type": "pixel_unshuffle",
    "decoder_norm_types": "rms_norm",
    "decoder_act_fns": "silu",
    "encoder_out_shortcut": True,
    "decoder_in_shortcut": True,
    "decoder_conv_act_fn": "relu",
}

FAMILIES = table(
    Family(
        "AutoencoderDC",
        lambda c, _: AutoencoderDC(c),
        DEFAULTS,
        blocks="encoder",
        attention="sdpa",
        supports="inference",
        verified="runs of diffusers on PyTorch's allocator, exact counts",
    )
)
