"""ControlNet of a UNet: a trained copy of its way down, whose states are added to what skips to the way up.

Source: diffusers 0.42.1, models/controlnets/controlnet.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.config.reader import Config
from memcalc.models.families.diffusion.unet import DEFAULTS, DownBlock, Inputs, UNet2DConditionModel
from memcalc.nn.layers.diffusion import Convolution
from memcalc.nn.module import Module
from memcalc.nn.stack import Stack

_CONDITION_CHANNELS = (16, 32, 96, 256)
"""Channels of the small network that reads the conditioning picture."""


class ConditioningEmbedding(Module):
    """A picture of pixels to the shape of the latents' first states."""

    scope = "conditioning"

    def __init__(self, channels: int) -> None:
        sizes = _CONDITION_CHANNELS
        self.conv_in = Convolution(3, sizes[0], 3, 3, padding=1)
        self.blocks: list[Module] = []
        for inputs, outputs in pairwise(sizes):
            self.blocks.append(Convolution(inputs, inputs, 3, 3, padding=1))
            self.blocks.append(Convolution(inputs, outputs, 3, 3, padding=1, stride=2))
        self.conv_out = Convolution(sizes[-1], channels, 3, 3, padding=1)

    def forward(self, conditioning: Tensor) -> Tensor:
        """[b, 3, 8 h, 8 w] to [b, c, h, w]."""
        embedding = self.conv_in(conditioning)
        embedding = ops.silu(embedding)
        for block in self.blocks:
            embedding = block(embedding)
            embedding = ops.silu(embedding)
        return self.conv_out(embedding)


class ControlNet(Module):
    """ControlNetModel.from_unet: what a UNet of this config has on its way down, and a projection for each state."""

    def __init__(self, c: Config) -> None:
        unet = UNet2DConditionModel(c)
        for _, module in unet.modules():
            if isinstance(module, Stack):
                module.rename(f"controlnet {module.name}")
        self.conv_in, self.time_embedding = unet.conv_in, unet.time_embedding
        if unet.projected:
            self.encoder_hid_proj = unet.encoder_hid_proj
        if unet.added:
            self.add_embedding = unet.add_embedding
        channels = c.integers("block_out_channels")
        self.controlnet_cond_embedding = ConditioningEmbedding(channels[0])
        self.down_blocks, self.mid_block = unet.down_blocks, unet.mid_block
        self.controlnet_down_blocks = [Convolution(channels[0], channels[0], 1, 1)]
        for size, down in zip(channels, self.down_blocks, strict=True):
            assert isinstance(down, DownBlock)
            count = len(down.resnets) + down.downsamples
            self.controlnet_down_blocks += [Convolution(size, size, 1, 1) for _ in range(count)]
        self.controlnet_mid_block = Convolution(channels[-1], channels[-1], 1, 1)
        self.embedded, self.projected = unet.embedded, unet.projected

    def forward(self, sample: Tensor, inputs: Inputs, conditioning: Tensor) -> list[Tensor]:
        """Latents [b, c, h, w] and a picture: a state for each that skips to the way up, and the middle's."""
        emb, *stays = self.embedded(sample, inputs)
        encoder = self.encoder_hid_proj(inputs.encoder) if self.projected else inputs.encoder
        sample = self.conv_in(sample)
        embedded = self.controlnet_cond_embedding(conditioning)
        sample = ops.add(sample, embedded)
        down_block_res_samples: tuple[Tensor, ...] = (sample,)
        for down in self.down_blocks:
            sample, res_samples = down(sample, emb, encoder)
            down_block_res_samples += res_samples
        sample = self.mid_block(sample, emb, encoder)
        made: tuple[Tensor, ...] = ()
        for res_sample, block in zip(down_block_res_samples, self.controlnet_down_blocks, strict=True):
            made += (block(res_sample),)
        down_block_res_samples = made
        mid_block_res_sample = self.controlnet_mid_block(sample)
        scaled = [ops.mul_scalar(state) for state in down_block_res_samples]
        mid_block_res_sample = ops.mul_scalar(mid_block_res_sample)
        del stays, embedded
        return [*scaled, mid_block_res_sample]


def controlnet_of(config: Mapping[str, Any]) -> ControlNet:
    """The ControlNet of a UNet's config."""
    return ControlNet(Config(config, DEFAULTS))
