"""HunyuanVideo: blocks with a stream for text and one for the video, then blocks with one; the text is refined first.

Source: diffusers 0.42.1, models/transformers/transformer_hunyuan_video.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from memcalc import ops
from memcalc.autograd.tape import Tape
from memcalc.autograd.tensor import Tensor
from memcalc.common.sizes import Shape
from memcalc.config.reader import Config
from memcalc.errors import ConfigError
from memcalc.models.common.denoiser import CLIP, Denoiser, Picture, PromptCall, given
from memcalc.models.families.diffusion.hunyuan_video_blocks import (
    HunyuanVideoSingleTransformerBlock,
    HunyuanVideoTransformerBlock,
    Tables,
    TimeText,
    TokenRefiner,
)
from memcalc.models.family import Family, table
from memcalc.nn.layers.diffusion import Convolution
from memcalc.nn.layers.diffusion_norms import AdaLayerNormContinuous
from memcalc.nn.layers.linear import Linear
from memcalc.nn.module import Module
from memcalc.nn.stack import Stack
from memcalc.tables.dtypes import BOOL, FP32, INT32, INT64


class PatchEmbed(Module):
    """Cubes of latents projected to tokens."""

    scope = "embedding"

    def __init__(self, channels: int, width: int, patch: tuple[int, ...]) -> None:
        self.proj = Convolution(channels, width, *patch, stride=patch)

    def forward(self, hidden: Tensor) -> Tensor:
        """[b, c, frames, h, w] to [b, s, width], a view."""
        hidden = self.proj(hidden)
        return ops.transpose(ops.view(hidden, *hidden.shape[:2], -1), 1, 2)


def _rotary_tables(tape: Tape, tokens: int, axes: Sequence[int]) -> Tables:
    """Cosines and sines [s, sum of axes] in fp32 of a grid of positions."""
    grid = tape.empty((len(axes), tokens), FP32)
    cosines, sines = [], []
    for width in axes:
        freqs = tape.empty((tokens, width // 2), FP32)
        cosines.append(_doubled(ops.cos(freqs)))
        sines.append(_doubled(ops.sin(freqs)))
        del freqs
    del grid
    return ops.cat(cosines, 1), ops.cat(sines, 1)


def _doubled(x: Tensor) -> Tensor:
    return x.tape.empty((x.shape[0], 2 * x.shape[1]), x.dtype)


class HunyuanVideoTransformer3DModel(Denoiser):
    """The denoiser of HunyuanVideo."""

    default_side, default_width, default_frames, default_text = 720, 1280, 129, 256
    guidance_in = "none"
    fp32_latents = True
    makes_videos = True

    def __init__(self, c: Config) -> None:
        if c.get("image_condition_type") is not None:
            raise ConfigError(f"{c.where} has 'image_condition_type', which memcalc does not describe.")
        heads, dim = c.integer("num_attention_heads"), c.integer("attention_head_dim")
        width, self.channels, self.axes = heads * dim, c.integer("in_channels"), c.integers("rope_axes_dim")
        self.patch = (c.integer("patch_size_t"), c.integer("patch_size"), c.integer("patch_size"))
        self.text_width, self.pooled = c.integer("text_embed_dim"), c.integer("pooled_projection_dim")
        self.out_channels, self.guidance = c.integer("out_channels"), c.flag("guidance_embeds", True)
        self.prompt_calls, inner = _PROMPT_CALLS, int(c.number("mlp_ratio") * width)
        self.x_embedder = PatchEmbed(self.channels, width, self.patch)
        self.context_embedder = TokenRefiner(self.text_width, width, heads, c.integer("num_refiner_layers"))
        self.time_text_embed = TimeText(width, self.pooled, guidance=self.guidance)
        self.transformer_blocks = Stack(
            ["double"] * c.integer("num_layers"),
            lambda _: HunyuanVideoTransformerBlock(width, heads, inner),
            name="block",
        )
        self.single_transformer_blocks = Stack(
            ["single"] * c.integer("num_single_layers"),
            lambda _: HunyuanVideoSingleTransformerBlock(width, heads, inner),
            name="single block",
        )
        self.norm_out = AdaLayerNormContinuous(width, width)
        self.proj_out = Linear(width, prod(self.patch) * self.out_channels, bias=True)

    def latent_shape(self, picture: Picture) -> Shape:
        """[b, channels, frames, h, w]."""
        sides = picture.latent_height, picture.latent_width
        return (picture.batch, self.channels, picture.latent_frames, *sides)

    def predict(self, latents: Tensor, picture: Picture) -> Tensor:
        """[b, channels, frames, h, w] to the same."""
        tape, batch = latents.tape, picture.batch
        timestep, encoder = given(tape, batch, dtype=INT64), given(tape, batch, picture.text, self.text_width)
        text_mask = given(tape, batch, picture.text, dtype=INT64)
        pooled = given(tape, batch, self.pooled)
        guidance = given(tape, batch, dtype=FP32) if self.guidance else None
        grid = [size // step for size, step in zip(latents.shape[2:], self.patch, strict=True)]
        tables = _rotary_tables(tape, prod(grid), self.axes)
        temb = self.time_text_embed(timestep, pooled, guidance)
        hidden = self.x_embedder(latents)
        encoder = self.context_embedder(encoder, timestep, text_mask)
        length = hidden.shape[1] + encoder.shape[1]
        effective = tape.empty((batch,), INT32), tape.empty((batch,), INT32)
        indices, mask_indices = tape.empty((1, length), INT64), tape.empty((batch, length), BOOL)
        mask = ops.unsqueeze(ops.unsqueeze(tape.empty((batch, length), BOOL), 1), 1)
        for block in self.transformer_blocks:
            hidden, encoder = block(hidden, encoder, temb, mask, tables)
        for block in self.single_transformer_blocks:
            hidden, encoder = block(hidden, encoder, temb, mask, tables)
        hidden = self.norm_out(hidden, temb)
        hidden = self.proj_out(hidden)
        hidden = ops.reshape(hidden, batch, *grid, -1, *self.patch)
        hidden = ops.permute(hidden, 0, 4, 1, 5, 2, 6, 3, 7)
        hidden = ops.reshape(hidden, batch, self.out_channels, *latents.shape[2:])
        del effective, indices, mask_indices  # they stay to the end
        return hidden


_TEMPLATE = 95
"""Tokens of the template around a prompt, whose states are dropped."""

_PROMPT_CALLS = {"LlamaModel": PromptCall(hidden=(-3,), mask=True, fewer=-_TEMPLATE), "CLIPTextModel": CLIP}

DEFAULTS = {
    "in_channels": 16,
    "out_channels": 16,
    "num_attention_heads": 24,
    "attention_head_dim": 128,
    "num_layers": 20,
    "num_single_layers": 40,
    "num_refiner_layers": 2,
    "mlp_ratio": 4.0,
    "patch_size": 2,
    "patch_size_t": 1,
    "guidance_embeds": True,
    "text_embed_dim": 4096,
    "pooled_projection_dim": 768,
    "rope_axes_dim": [16, 56, 56],
    "image_condition_type": None,
}

FAMILIES = table(
    Family(
        "HunyuanVideoTransformer3DModel",
        lambda c, _: HunyuanVideoTransformer3DModel(c),
        DEFAULTS,
        blocks="encoder",
        attention="sdpa",
        supports="training, inference, LoRA",
        verified="runs of diffusers on PyTorch's allocator",
    )
)
