"""Wan 2.1 and 2.2: a video transformer whose norms and modulation are in fp32.

Source: diffusers 0.42.1, models/transformers/transformer_wan.py.
"""

from __future__ import annotations

from math import prod

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.common.sizes import Shape
from memcalc.config.reader import Config
from memcalc.errors import ConfigError
from memcalc.models.common.denoiser import Denoiser, Picture, PromptCall, given
from memcalc.models.families.diffusion.wan_blocks import ConditionEmbedder, Rope, WanTransformerBlock, modulated_in_fp32
from memcalc.models.family import Family, table
from memcalc.nn.layers.diffusion import Convolution
from memcalc.nn.layers.diffusion_norms import FP32LayerNorm
from memcalc.nn.layers.linear import Linear
from memcalc.nn.module import Parameter
from memcalc.nn.stack import Stack
from memcalc.tables.dtypes import FP32, INT64


class WanTransformer3DModel(Denoiser):
    """The denoiser of Wan; with more channels in than out, what follows the latents are those of a picture."""

    default_side, default_width, default_frames, default_text = 480, 832, 81, 512
    guidance_in = "two"
    fp32_latents = True
    makes_videos = rounds_frames = True

    def __init__(self, c: Config) -> None:
        self.image_width, image = c.optional("image_dim"), c.optional("added_kv_proj_dim")
        if c.optional("pos_embed_seq_len") is not None or (self.image_width is None) != (image is None):
            raise ConfigError(
                f"{c.where} has images at both ends ('pos_embed_seq_len'), or one of 'image_dim' and "
                "'added_kv_proj_dim' alone, which memcalc does not describe."
            )
        heads, dim = c.integer("num_attention_heads"), c.integer("attention_head_dim")
        width, self.channels = heads * dim, c.integer("in_channels")
        self.patch = tuple(c.integers("patch_size", minimum=1))
        self.text_width, self.out_channels = c.integer("text_dim"), c.integer("out_channels")
        self.conditioned = max(self.channels - self.out_channels, 0)
        self.ratio = 16 if self.channels == _CHANNELS_OF_22 else 8
        self.pixels_per_token = self.ratio * self.patch[1]
        self.prompt_calls = _PROMPT_CALLS
        self.rope = Rope(dim, c.integer("rope_max_seq_len"))
        self.patch_embedding = Convolution(self.channels, width, *self.patch, stride=self.patch)
        self.condition_embedder = ConditionEmbedder(width, c.integer("freq_dim"), self.text_width, self.image_width)
        inner, cross = c.integer("ffn_dim"), c.flag("cross_attn_norm", True)
        self.blocks = Stack(
            ["block"] * c.integer("num_layers"),
            lambda _: WanTransformerBlock(width, inner, heads, cross_norm=cross, image=image),
            name="block",
        )
        self.norm_out = FP32LayerNorm(width)
        self.proj_out = Linear(width, self.out_channels * prod(self.patch), bias=True)
        self.scale_shift_table = Parameter(1, 2, width, dtype=FP32)

    def latent_shape(self, picture: Picture) -> Shape:
        """[b, channels, frames, h, w]."""
        sides = picture.height // self.ratio, picture.width // self.ratio
        return (picture.batch, self.channels, picture.latent_frames, *sides)

    def predict(self, latents: Tensor, picture: Picture) -> Tensor:
        """[b, channels, frames, h, w] to the same."""
        tape, batch = latents.tape, picture.batch
        timestep, encoder = given(tape, batch, dtype=INT64), given(tape, batch, picture.text, self.text_width)
        image = None if self.image_width is None else given(tape, batch, _IMAGE_TOKENS, self.image_width)
        grid = [size // step for size, step in zip(latents.shape[2:], self.patch, strict=True)]
        tables = self.rope(latents, prod(grid))
        hidden = self.patch_embedding(latents)
        hidden = ops.transpose(ops.view(hidden, *hidden.shape[:2], -1), 1, 2)
        hidden = ops.contiguous(hidden)
        temb, timestep_proj, encoder, image = self.condition_embedder(timestep, encoder, image)
        timestep_proj = ops.view(timestep_proj, batch, 6, -1)
        encoder = encoder if image is None else ops.cat([image, encoder], 1)
        for block in self.blocks:
            hidden = block(hidden, encoder, timestep_proj, tables)
        shift, scale = ops.chunk(ops.add(self.scale_shift_table, ops.unsqueeze(temb, 1)), 2, 1)
        hidden = modulated_in_fp32(self.norm_out, hidden, scale, shift)
        hidden = self.proj_out(hidden)
        hidden = ops.reshape(hidden, batch, *grid, *self.patch, -1)
        hidden = ops.permute(hidden, 0, 7, 1, 4, 2, 5, 3, 6)
        return ops.reshape(hidden, batch, self.out_channels, *latents.shape[2:])


_CHANNELS_OF_22 = 48
"""Latents of the autoencoder that Wan 2.2 brought, each of 16 pixels a side."""

_IMAGE_TOKENS = 257
"""What CLIP makes of the picture of 224 pixels that a video begins with."""

_PROMPT_CALLS = {"UMT5EncoderModel": PromptCall(mask=True)}

DEFAULTS = {
    "patch_size": [1, 2, 2],
    "num_attention_heads": 40,
    "attention_head_dim": 128,
    "in_channels": 16,
    "out_channels": 16,
    "text_dim": 4096,
    "freq_dim": 256,
    "ffn_dim": 13824,
    "num_layers": 40,
    "cross_attn_norm": True,
    "image_dim": None,
    "added_kv_proj_dim": None,
    "rope_max_seq_len": 1024,
}

FAMILIES = table(
    Family(
        "WanTransformer3DModel",
        lambda c, _: WanTransformer3DModel(c),
        DEFAULTS,
        blocks="encoder",
        attention="sdpa",
        supports="training, inference, LoRA",
        verified="runs of diffusers on PyTorch's allocator",
    )
)
