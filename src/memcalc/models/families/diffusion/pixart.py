"""PixArt-alpha and PixArt-Sigma: a transformer whose blocks share one modulation of the time step.

Source: diffusers 0.42.1, models/transformers/pixart_transformer_2d.py, models/attention.py (`ada_norm_single`).
"""

from __future__ import annotations

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.common.sizes import Shape
from memcalc.config.reader import Config
from memcalc.errors import ConfigError
from memcalc.models.common.denoiser import LATENT_SCALE, Denoiser, Picture, PromptCall, given
from memcalc.models.family import Family, table
from memcalc.nn.layers.diffusion import (
    CaptionProjection,
    FeedForward,
    PatchProjection,
    TimestepEmbedding,
    timestep_embedding,
    unpatchified,
)
from memcalc.nn.layers.diffusion_blocks import CrossAttention
from memcalc.nn.layers.linear import Linear
from memcalc.nn.layers.norms import LayerNorm
from memcalc.nn.module import Buffer, Module, Parameter
from memcalc.nn.stack import Stack
from memcalc.tables.dtypes import FP32, FP64, INT64


class TablePatchEmbed(PatchProjection):
    """Patches with a table of positions for one size; for others it is computed anew."""

    def __init__(self, channels: int, width: int, patch: int, side: int) -> None:
        super().__init__(channels, width, patch)
        self.side = side // patch
        self.pos_embed = Buffer(1, self.side**2, width)

    def forward(self, latent: Tensor) -> Tensor:
        """[b, c, h, w] to [b, patches, width]."""
        height, width = (size // self.patch for size in latent.shape[-2:])
        latent = self.patches(latent)
        positions: Tensor = self.pos_embed
        if (height, width) != (self.side, self.side):
            table = latent.tape.empty((1, height * width, latent.shape[-1]), FP64)
            positions = ops.to(table, FP32)
            del table
        return ops.to(ops.add(latent, positions), latent.dtype)


class SizeEmbeddings(Module):
    """Time step, and resolution and aspect ratio where the model is told them."""

    scope = "embedding"

    def __init__(self, width: int, *, sized: bool) -> None:
        self.timestep_embedder = TimestepEmbedding(256, width)
        self.sized = sized
        if sized:
            self.resolution_embedder = TimestepEmbedding(256, width // 3)
            self.aspect_ratio_embedder = TimestepEmbedding(256, width // 3)

    def forward(self, timestep: Tensor, hidden: Tensor) -> Tensor:
        """[b] to [b, width]."""
        dtype, batch = hidden.dtype, timestep.shape[0]
        timesteps_proj = timestep_embedding(timestep, 256)
        timesteps_emb: Tensor = self.timestep_embedder(ops.to(timesteps_proj, dtype))
        if not self.sized:
            return timesteps_emb
        resolution = given(timestep.tape, batch, 2)
        aspect_ratio = given(timestep.tape, batch, 1)
        resolution_emb = ops.to(timestep_embedding(ops.reshape(resolution, -1), 256), dtype)
        resolution_emb = ops.reshape(self.resolution_embedder(resolution_emb), batch, -1)
        ratio_emb = ops.to(timestep_embedding(ops.reshape(aspect_ratio, -1), 256), dtype)
        ratio_emb = ops.reshape(self.aspect_ratio_embedder(ratio_emb), batch, -1)
        return ops.add(timesteps_emb, ops.cat([resolution_emb, ratio_emb], 1))


class AdaLayerNormSingle(Module):
    """One modulation for all blocks."""

    scope = "embedding"

    def __init__(self, width: int, *, sized: bool = False) -> None:
        self.emb = SizeEmbeddings(width, sized=sized)
        self.linear = Linear(width, 6 * width, bias=True)

    def forward(self, timestep: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """[b] to [b, 6 h] and [b, h]."""
        embedded = self.emb(timestep, hidden)
        return self.linear(ops.silu(embedded)), embedded


class PixArtBlock(Module):
    """Self-attention, cross-attention over the text, and an MLP, modulated by a table and the time step."""

    scope = "residual stream"

    def __init__(self, width: int, heads: int, text: int) -> None:
        self.norm1 = LayerNorm(width, affine=False)
        self.attn1 = CrossAttention(width, heads, bias=True)
        self.norm2 = LayerNorm(width, affine=False)
        self.attn2 = CrossAttention(width, heads, text, bias=True)
        self.ff = FeedForward(width)
        self.scale_shift_table = Parameter(6, width)

    def forward(self, hidden: Tensor, encoder: Tensor, mask: Tensor, timestep: Tensor) -> Tensor:
        """[b, s, h] to the same."""
        batch = hidden.shape[0]
        shift_msa, scale_msa, gate_msa, shift_mlp, scale_mlp, gate_mlp = ops.chunk(
            ops.add(ops.unsqueeze(self.scale_shift_table, 0), ops.reshape(timestep, batch, 6, -1)), 6, 1
        )
        norm_hidden = self.norm1(hidden)
        norm_hidden = ops.add(ops.mul(norm_hidden, ops.add_scalar(scale_msa)), shift_msa)
        attn_output = self.attn1(norm_hidden)
        attn_output = ops.mul(gate_msa, attn_output)
        hidden = ops.add(attn_output, hidden)
        norm_hidden = hidden
        attn_output = self.attn2(norm_hidden, encoder, mask)
        hidden = ops.add(attn_output, hidden)
        norm_hidden = self.norm2(hidden)
        norm_hidden = ops.add(ops.mul(norm_hidden, ops.add_scalar(scale_mlp)), shift_mlp)
        ff_output = self.ff(norm_hidden)
        ff_output = ops.mul(gate_mlp, ff_output)
        return ops.add(ff_output, hidden)


class PixArtTransformer2DModel(Denoiser):
    """The denoiser of PixArt: it predicts a variance too, which is dropped."""

    default_text = 300

    def __init__(self, c: Config) -> None:
        if c.get("norm_type") != "ada_norm_single" or c.optional("caption_channels") is None:
            raise ConfigError(f"{c.where} has another 'norm_type' than ada_norm_single, or no 'caption_channels'.")
        side, self.patch = c.integer("sample_size"), c.integer("patch_size")
        self.default_side, self.prompt_calls = LATENT_SCALE * side, _PROMPT_CALLS
        heads, dim = c.integer("num_attention_heads"), c.integer("attention_head_dim")
        width, self.channels = heads * dim, c.integer("in_channels")
        self.out_channels = c.optional("out_channels") or self.channels
        self.text_width, cross = c.integer("caption_channels"), c.integer("cross_attention_dim")
        sized = c.get("use_additional_conditions")
        self.pos_embed = TablePatchEmbed(self.channels, width, self.patch, side)
        self.transformer_blocks = Stack(
            ["block"] * c.integer("num_layers"), lambda _: PixArtBlock(width, heads, cross), name="block"
        )
        self.norm_out = LayerNorm(width, affine=False)
        self.scale_shift_table = Parameter(2, width)
        self.proj_out = Linear(width, self.patch**2 * self.out_channels, bias=True)
        self.adaln_single = AdaLayerNormSingle(width, sized=side == _SIDE_OF_ALPHA if sized is None else bool(sized))
        self.caption_projection = CaptionProjection(self.text_width, width)

    def latent_shape(self, picture: Picture) -> Shape:
        """[b, channels, h, w]."""
        return (picture.batch, self.channels, picture.latent_height, picture.latent_width)

    def learnt_part(self, prediction: Tensor) -> Tensor:
        """The first half of the channels."""
        return ops.chunk(prediction, 2, 1)[0] if self.out_channels == 2 * self.channels else prediction

    def predict(self, latents: Tensor, picture: Picture) -> Tensor:
        """[b, channels, h, w] to [b, out channels, h, w]."""
        tape, batch = latents.tape, picture.batch
        timestep, encoder = given(tape, batch, dtype=INT64), given(tape, batch, picture.text, self.text_width)
        mask = given(tape, batch, picture.text, dtype=INT64)
        mask = ops.mul_scalar(ops.add_scalar(ops.to(mask, latents.dtype)))
        mask = ops.unsqueeze(mask, 1)
        hidden = self.pos_embed(latents)
        timestep, embedded = self.adaln_single(timestep, hidden)
        encoder = self.caption_projection(encoder)
        encoder = ops.view(encoder, batch, -1, hidden.shape[-1])
        for block in self.transformer_blocks:
            hidden = block(hidden, encoder, mask, timestep)
        shift, scale = ops.chunk(ops.add(ops.unsqueeze(self.scale_shift_table, 0), ops.unsqueeze(embedded, 1)), 2, 1)
        hidden = self.norm_out(hidden)
        hidden = ops.add(ops.mul(hidden, ops.add_scalar(scale)), shift)
        hidden = self.proj_out(hidden)
        return unpatchified(hidden, picture.latent_height, picture.latent_width, self.patch, self.out_channels)


_SIDE_OF_ALPHA = 128
"""Latents a side at which models are told resolution and aspect ratio unless the config says otherwise."""

_PROMPT_CALLS = {"T5EncoderModel": PromptCall(mask=True)}

DEFAULTS = {
    "num_attention_heads": 16,
    "attention_head_dim": 72,
    "in_channels": 4,
    "out_channels": 8,
    "num_layers": 28,
    "cross_attention_dim": 1152,
    "sample_size": 128,
    "patch_size": 2,
    "norm_type": "ada_norm_single",
    "use_additional_conditions": None,
    "caption_channels": None,
}

FAMILIES = table(
    Family(
        "PixArtTransformer2DModel",
        lambda c, _: PixArtTransformer2DModel(c),
        DEFAULTS,
        blocks="encoder",
        attention="sdpa",
        supports="training, inference, LoRA",
        verified="runs of diffusers on PyTorch's allocator",
    )
)
