"""ControlNet of FLUX.1: a short copy of the denoiser, whose states are added behind the denoiser's blocks.

Source: diffusers 0.42.1, models/controlnets/controlnet_flux.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.config.reader import Config
from memcalc.models.families.diffusion.flux import DEFAULTS, FluxTransformer2DModel, Inputs, Residuals
from memcalc.nn.layers.diffusion import rotary_tables
from memcalc.nn.layers.linear import Linear
from memcalc.nn.module import Module
from memcalc.nn.stack import Stack

LAYERS = 4
"""Double and single blocks that the script makes (--num_double_layers, --num_single_layers)."""


class FluxControlNet(Module):
    """FluxControlNetModel.from_transformer: the denoiser's embeddings, few of its blocks, and a projection for each."""

    def __init__(self, c: Config) -> None:
        model = FluxTransformer2DModel(c.replaced(num_layers=LAYERS, num_single_layers=LAYERS))
        for _, module in model.modules():
            if isinstance(module, Stack):
                module.rename(f"controlnet {module.name}")
                module.split(range(LAYERS))  # what each makes is projected apart
        width = model.width
        self.axes, self.embedded = model.axes, model.embedded
        self.time_text_embed, self.context_embedder = model.time_text_embed, model.context_embedder
        self.x_embedder = model.x_embedder
        self.transformer_blocks, self.single_transformer_blocks = (
            model.transformer_blocks,
            model.single_transformer_blocks,
        )
        self.controlnet_blocks = [Linear(width, width, bias=True) for _ in range(LAYERS)]
        self.controlnet_single_blocks = [Linear(width, width, bias=True) for _ in range(LAYERS)]
        self.controlnet_x_embedder = Linear(model.channels, width, bias=True)

    def forward(self, latents: Tensor, inputs: Inputs, conditioning: Tensor) -> Residuals:
        """Packed latents [b, s, c] and a picture's: what is added behind double blocks and behind single ones."""
        hidden = self.x_embedder(latents)
        hidden = ops.add(hidden, self.controlnet_x_embedder(conditioning))
        temb, encoder, *stays = self.embedded(hidden, inputs)
        ids = ops.cat([inputs.txt_ids, inputs.img_ids], 0)
        tables = rotary_tables(ids, self.axes)
        block_samples: tuple[Tensor, ...] = ()
        for block in self.transformer_blocks:
            encoder, hidden = block(hidden, encoder, temb, tables)
            block_samples += (hidden,)
        single_block_samples: tuple[Tensor, ...] = ()
        for block in self.single_transformer_blocks:
            encoder, hidden = block(hidden, encoder, temb, tables)
            single_block_samples += (hidden,)
        made = _projected(block_samples, self.controlnet_blocks)
        single_made = _projected(single_block_samples, self.controlnet_single_blocks)
        double = [ops.mul_scalar(sample) for sample in made]
        made = ()
        single = [ops.mul_scalar(sample) for sample in single_made]
        del stays
        return double, single


def _projected(samples: tuple[Tensor, ...], blocks: list[Linear]) -> tuple[Tensor, ...]:
    return tuple(block(sample) for sample, block in zip(samples, blocks, strict=True))


def controlnet_of(config: Mapping[str, Any]) -> FluxControlNet:
    """The ControlNet of a FLUX.1 config."""
    return FluxControlNet(Config(config, DEFAULTS))
