"""Sana: linear attention over the picture, attention over the text, and convolutions in place of an MLP.

Source: diffusers 0.42.1, models/transformers/sana_transformer.py, attention_processor.py (SanaLinearAttnProcessor2_0).
"""

from __future__ import annotations

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.common.sizes import Shape
from memcalc.config.reader import Config
from memcalc.errors import ConfigError
from memcalc.models.common.denoiser import Denoiser, Picture, PromptCall, given
from memcalc.models.families.diffusion.pixart import AdaLayerNormSingle
from memcalc.models.family import Family, table
from memcalc.nn.layers.diffusion import (
    CaptionProjection,
    Convolution,
    NoDropout,
    PatchProjection,
    TimestepEmbedding,
    timestep_embedding,
    unpatchified,
)
from memcalc.nn.layers.diffusion_blocks import CrossAttention
from memcalc.nn.layers.diffusion_norms import EagerRMSNorm
from memcalc.nn.layers.linear import Linear
from memcalc.nn.layers.norms import LayerNorm
from memcalc.nn.module import Module, Parameter
from memcalc.nn.stack import Stack
from memcalc.tables.dtypes import FP16, FP32, INT64


class LinearAttention(Module):
    """Attention by products of keys and values in fp32, without a softmax."""

    scope = "attention"

    def __init__(self, width: int, heads: int, *, bias: bool, normed: bool) -> None:
        self.heads = heads
        self.norm_q = EagerRMSNorm(width) if normed else NoDropout()
        self.norm_k = EagerRMSNorm(width) if normed else NoDropout()
        self.to_q = Linear(width, width, bias=bias)
        self.to_k = Linear(width, width, bias=bias)
        self.to_v = Linear(width, width, bias=bias)
        self.to_out = [Linear(width, width, bias=True), NoDropout()]

    def _heads(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        return ops.reshape(ops.transpose(x, 1, 2), batch, self.heads, width // self.heads, length)

    def forward(self, hidden: Tensor) -> Tensor:
        """[b, s, h] to the same."""
        dtype = hidden.dtype
        query, key, value = self.to_q(hidden), self.to_k(hidden), self.to_v(hidden)
        query = self.norm_q(query)
        key = self.norm_k(key)
        query = self._heads(query)
        key = ops.transpose(self._heads(key), 2, 3)
        value = self._heads(value)
        query = ops.relu(query)
        key = ops.relu(key)
        query, key, value = ops.to(query, FP32), ops.to(key, FP32), ops.to(value, FP32)
        value = ops.pad(value, 2, 1)
        scores = ops.matmul(value, key)
        hidden = ops.matmul(scores, query)
        dim = hidden.shape[2] - 1
        hidden = ops.div(ops.narrow(hidden, 2, dim), ops.add_scalar(ops.narrow(hidden, 2, 1)))
        hidden = ops.transpose(ops.reshape(hidden, hidden.shape[0], -1, hidden.shape[-1]), 1, 2)
        hidden = ops.to(hidden, dtype)
        hidden = self.to_out[0](hidden)
        if dtype is FP16:
            hidden = ops.clamp(hidden)
        return hidden


class GLUMBConv(Module):
    """Convolutions of one pixel around a depthwise one, half of which gates the other."""

    scope = "MLP"

    def __init__(self, width: int, inner: int) -> None:
        self.conv_inverted = Convolution(width, 2 * inner, 1, 1)
        self.conv_depth = Convolution(1, 2 * inner, 3, 3, padding=1)
        self.conv_point = Convolution(inner, width, 1, 1, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """[b, c, h, w] to the same."""
        hidden = self.conv_inverted(hidden)
        hidden = ops.silu(hidden)
        hidden = self.conv_depth(hidden)
        hidden, gate = ops.chunk(hidden, 2, 1)
        hidden = ops.mul(hidden, ops.silu(gate))
        return self.conv_point(hidden)


class SanaTransformerBlock(Module):
    """Linear self-attention, cross-attention over the text, and convolutions, modulated by a table and the time."""

    scope = "residual stream"

    def __init__(self, width: int, heads: tuple[int, int], text: int, inner: int, *, bias: bool, normed: bool) -> None:
        self.norm1 = LayerNorm(width, affine=False)
        self.attn1 = LinearAttention(width, heads[0], bias=bias, normed=normed)
        self.norm2 = LayerNorm(width, affine=False)
        self.attn2 = CrossAttention(width, heads[1], text, bias=True)
        if normed:
            self.attn2.norm_q, self.attn2.norm_k = EagerRMSNorm(width), EagerRMSNorm(width)
        self.ff = GLUMBConv(width, inner)
        self.scale_shift_table = Parameter(6, width)

    def forward(
        self, hidden: Tensor, encoder: Tensor, mask: Tensor, timestep: Tensor, sides: tuple[int, int]
    ) -> Tensor:
        """[b, s, h] to the same."""
        batch = hidden.shape[0]
        shift_msa, scale_msa, gate_msa, shift_mlp, scale_mlp, gate_mlp = ops.chunk(
            ops.add(ops.unsqueeze(self.scale_shift_table, 0), ops.reshape(timestep, batch, 6, -1)), 6, 1
        )
        norm_hidden = self.norm1(hidden)
        norm_hidden = ops.add(ops.mul(norm_hidden, ops.add_scalar(scale_msa)), shift_msa)
        norm_hidden = ops.to(norm_hidden, hidden.dtype)
        attn_output = self.attn1(norm_hidden)
        hidden = ops.add(hidden, ops.mul(gate_msa, attn_output))
        attn_output = self.attn2(hidden, encoder, mask)
        hidden = ops.add(attn_output, hidden)
        norm_hidden = self.norm2(hidden)
        norm_hidden = ops.add(ops.mul(norm_hidden, ops.add_scalar(scale_mlp)), shift_mlp)
        norm_hidden = ops.permute(ops.reshape(norm_hidden, batch, *sides, -1), 0, 3, 1, 2)
        ff_output = self.ff(norm_hidden)
        ff_output = ops.permute(ops.reshape(ff_output, *ff_output.shape[:2], -1), 0, 2, 1)
        return ops.add(hidden, ops.mul(gate_mlp, ff_output))


class CombinedTimestepGuidance(Module):
    """One modulation for all blocks, by the time step and the guidance (SANA-Sprint)."""

    scope = "embedding"

    def __init__(self, width: int) -> None:
        self.timestep_embedder = TimestepEmbedding(256, width)
        self.guidance_embedder = TimestepEmbedding(256, width)
        self.linear = Linear(width, 6 * width, bias=True)

    def forward(self, timestep: Tensor, guidance: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """[b] and [b] to [b, 6 h] and [b, h]."""
        timesteps_proj = timestep_embedding(timestep, 256)
        timesteps_emb = self.timestep_embedder(ops.to(timesteps_proj, hidden.dtype))
        guidance_proj = timestep_embedding(guidance, 256)
        guidance_emb = self.guidance_embedder(ops.to(guidance_proj, hidden.dtype))
        conditioning = ops.add(timesteps_emb, guidance_emb)
        return self.linear(ops.silu(conditioning)), conditioning


class SanaTransformer2DModel(Denoiser):
    """The denoiser of Sana, on latents of 32 pixels a side."""

    default_text = 300
    pixels_per_token = 32
    trains_with_fp32_vae = True

    def __init__(self, c: Config) -> None:
        if c.get("interpolation_scale") is not None or c.get("qk_norm") not in (None, "rms_norm_across_heads"):
            raise ConfigError(f"{c.where} has an 'interpolation_scale' or a 'qk_norm' that memcalc does not describe.")
        normed, self.guidance = c.get("qk_norm") is not None, c.flag("guidance_embeds")
        self.guidance_in = "none" if self.guidance else "batch"
        heads = c.integer("num_attention_heads"), c.integer("num_cross_attention_heads")
        width, self.channels = heads[0] * c.integer("attention_head_dim"), c.integer("in_channels")
        self.patch, self.prompt_calls = c.integer("patch_size"), _PROMPT_CALLS
        self.out_channels = c.optional("out_channels") or self.channels
        self.default_side, self.text_width = 32 * c.integer("sample_size"), c.integer("caption_channels")
        self.pixels_per_token = 32 * self.patch
        cross, inner = c.integer("cross_attention_dim"), int(c.number("mlp_ratio") * width)
        bias = c.flag("attention_bias")
        self.patch_embed = PatchProjection(self.channels, width, self.patch)
        self.time_embed = CombinedTimestepGuidance(width) if self.guidance else AdaLayerNormSingle(width)
        self.caption_projection = CaptionProjection(self.text_width, width)
        self.caption_norm = EagerRMSNorm(width)
        self.transformer_blocks = Stack(
            ["block"] * c.integer("num_layers"),
            lambda _: SanaTransformerBlock(width, heads, cross, inner, bias=bias, normed=normed),
            name="block",
        )
        self.scale_shift_table = Parameter(2, width)
        self.norm_out = LayerNorm(width, affine=False)
        self.proj_out = Linear(width, self.patch**2 * self.out_channels, bias=True)

    def latent_shape(self, picture: Picture) -> Shape:
        """[b, channels, h / 32, w / 32]."""
        return (picture.batch, self.channels, picture.height // 32, picture.width // 32)

    def predict(self, latents: Tensor, picture: Picture) -> Tensor:
        """[b, channels, h, w] to the same."""
        tape, batch = latents.tape, picture.batch
        timestep, encoder = given(tape, batch, dtype=INT64), given(tape, batch, picture.text, self.text_width)
        guidance = given(tape, batch) if self.guidance else None
        mask = given(tape, batch, picture.text, dtype=INT64)
        mask = ops.mul_scalar(ops.add_scalar(ops.to(mask, latents.dtype)))
        mask = ops.unsqueeze(mask, 1)
        height, width = latents.shape[-2:]
        hidden = self.patch_embed.patches(latents)
        if isinstance(self.time_embed, CombinedTimestepGuidance):
            assert guidance is not None
            timestep, embedded = self.time_embed(timestep, guidance, hidden)
        else:
            timestep, embedded = self.time_embed(timestep, hidden)
        encoder = self.caption_projection(encoder)
        encoder = ops.view(encoder, batch, -1, hidden.shape[-1])
        encoder = self.caption_norm(encoder)
        sides = height // self.patch, width // self.patch
        for block in self.transformer_blocks:
            hidden = block(hidden, encoder, mask, timestep, sides)
        hidden = self._normed(hidden, embedded)
        hidden = self.proj_out(hidden)
        return unpatchified(hidden, height, width, self.patch, self.out_channels)

    def _normed(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        """The last norm, scaled and shifted by the time step (SanaModulatedNorm)."""
        hidden = self.norm_out(hidden)
        table = ops.add(ops.unsqueeze(self.scale_shift_table, 0), ops.unsqueeze(embedded, 1))
        shift, scale = ops.chunk(table, 2, 1)
        del table
        return ops.add(ops.mul(hidden, ops.add_scalar(scale)), shift)


_PROMPT_CALLS = {"Gemma2Model": PromptCall(mask=True)}

DEFAULTS = {
    "in_channels": 32,
    "out_channels": 32,
    "num_attention_heads": 70,
    "attention_head_dim": 32,
    "num_layers": 20,
    "num_cross_attention_heads": 20,
    "cross_attention_head_dim": 112,
    "cross_attention_dim": 2240,
    "caption_channels": 2304,
    "mlp_ratio": 2.5,
    "attention_bias": False,
    "sample_size": 32,
    "patch_size": 1,
    "qk_norm": None,
    "interpolation_scale": None,
}

FAMILIES = table(
    Family(
        "SanaTransformer2DModel",
        lambda c, _: SanaTransformer2DModel(c),
        DEFAULTS,
        blocks="encoder",
        attention="sdpa",
        supports="training, inference, LoRA",
        verified="runs of diffusers on PyTorch's allocator",
    )
)
