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
from memcalc.models.family import Family, table
from memcalc.nn.layers.diffusion import (
    CaptionProjection,
    Convolution,
    FeedForward,
    NoDropout,
    TimestepEmbedding,
    keep_in_fp32,
    native_attention,
    timestep_embedding,
)
from memcalc.nn.layers.diffusion_norms import FP32LayerNorm, RMSNorm
from memcalc.nn.layers.linear import Linear
from memcalc.nn.module import Buffer, Module, Parameter
from memcalc.nn.stack import Stack
from memcalc.tables.dtypes import FP32, INT64

Tables = tuple[Tensor, Tensor]


def _rotated(hidden: Tensor, tables: Tables) -> Tensor:
    """[b, s, heads, d] turned by pairs, written half by half into a new tensor."""
    first, second = ops.unbind(ops.reshape(hidden, *hidden.shape[:-1], -1, 2), -1)
    cos, sin = (ops.slice(table, -1, 2) for table in tables)
    out = ops.empty_like(hidden.detach())
    out = ops.copy_slice_(out, ops.sub(ops.mul(first, cos), ops.mul(second, sin)))
    out = ops.copy_slice_(out, ops.add(ops.mul(first, sin), ops.mul(second, cos)))
    return ops.to(out, hidden.dtype)


class WanAttention(Module):
    """Attention over the video, or of the video over the text."""

    scope = "attention"

    def __init__(self, width: int, heads: int) -> None:
        self.heads = heads
        self.to_q = Linear(width, width, bias=True)
        self.to_k = Linear(width, width, bias=True)
        self.to_v = Linear(width, width, bias=True)
        self.to_out = [Linear(width, width, bias=True), NoDropout()]
        self.norm_q = RMSNorm(width)
        self.norm_k = RMSNorm(width)

    def _heads(self, x: Tensor) -> Tensor:
        return ops.reshape(x, *x.shape[:2], self.heads, -1)

    def forward(self, hidden: Tensor, encoder: Tensor | None, tables: Tables | None) -> Tensor:
        """[b, s, h] to the same."""
        encoder = hidden if encoder is None else encoder
        query, key, value = self.to_q(hidden), self.to_k(encoder), self.to_v(encoder)
        query = self.norm_q(query)
        key = self.norm_k(key)
        query = self._heads(query)
        key = self._heads(key)
        value = self._heads(value)
        if tables is not None:
            query = _rotated(query, tables)
            key = _rotated(key, tables)
        hidden = native_attention(query, key, value)
        hidden = ops.reshape(hidden, *hidden.shape[:2], -1)
        hidden = ops.to(hidden, query.dtype)
        return self.to_out[0](hidden)  # type: ignore[no-any-return]


class WanTransformerBlock(Module):
    """Self-attention, cross-attention over the text, and an MLP."""

    scope = "residual stream"

    def __init__(self, width: int, inner: int, heads: int, *, cross_norm: bool) -> None:
        self.norm1 = FP32LayerNorm(width)
        self.attn1 = WanAttention(width, heads)
        self.attn2 = WanAttention(width, heads)
        self.norm2 = FP32LayerNorm(width, affine=True) if cross_norm else NoDropout()
        self.ffn = FeedForward(width, inner)
        self.norm3 = FP32LayerNorm(width)
        self.scale_shift_table = Parameter(1, 6, width, dtype=FP32)
        keep_in_fp32(self.norm2)

    def forward(self, hidden: Tensor, encoder: Tensor, temb: Tensor, tables: Tables) -> Tensor:
        """[b, s, h] to the same."""
        shift_msa, scale_msa, gate_msa, c_shift_msa, c_scale_msa, c_gate_msa = ops.chunk(
            ops.add(self.scale_shift_table, ops.to(temb, FP32)), 6, 1
        )
        norm_hidden = _in_fp32(self.norm1, hidden, scale_msa, shift_msa)
        attn_output = self.attn1(norm_hidden, None, tables)
        hidden = ops.to(ops.add(ops.to(hidden, FP32), ops.mul(attn_output, gate_msa)), hidden.dtype)
        norm_hidden = ops.to(self.norm2(ops.to(hidden, FP32)), hidden.dtype)
        attn_output = self.attn2(norm_hidden, encoder, None)
        hidden = ops.add(hidden, attn_output)
        norm_hidden = _in_fp32(self.norm3, hidden, c_scale_msa, c_shift_msa)
        ff_output = self.ffn(norm_hidden)
        return ops.to(ops.add(ops.to(hidden, FP32), ops.mul(ops.to(ff_output, FP32), c_gate_msa)), hidden.dtype)


def _in_fp32(norm: Module, hidden: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """A norm in fp32, scaled and shifted there, and cast back."""
    out = ops.add(ops.mul(norm(ops.to(hidden, FP32)), ops.add_scalar(scale)), shift)
    return ops.to(out, hidden.dtype)


class ConditionEmbedder(Module):
    """Time step and text (WanTimeTextImageEmbedding)."""

    scope = "embedding"

    def __init__(self, width: int, freq: int, text: int) -> None:
        self.freq = freq
        self.time_embedder = TimestepEmbedding(freq, width)
        self.time_proj = Linear(width, 6 * width, bias=True)
        self.text_embedder = CaptionProjection(text, width)
        keep_in_fp32(self.time_embedder)

    def forward(self, timestep: Tensor, encoder: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[b] and [b, t, text] to [b, h], [b, 6 h] and [b, t, h]."""
        timestep = timestep_embedding(timestep, self.freq)
        temb = ops.to(self.time_embedder(timestep), encoder.dtype)
        timestep_proj = self.time_proj(ops.silu(temb))
        encoder = self.text_embedder(encoder)
        return temb, timestep_proj, encoder


class Rope(Module):
    """Tables of rotary positions for frames, rows and columns, as buffers that are not saved."""

    scope = "rotary embedding"

    def __init__(self, dim: int, longest: int) -> None:
        self.dim = dim
        self.freqs_cos = Buffer(longest, dim)
        self.freqs_sin = Buffer(longest, dim)

    def forward(self, hidden: Tensor, tokens: int) -> Tables:
        """Cosines and sines [1, s, 1, d]."""
        tape = hidden.tape
        return tape.empty((1, tokens, 1, self.dim), FP32), tape.empty((1, tokens, 1, self.dim), FP32)


class WanTransformer3DModel(Denoiser):
    """The denoiser of Wan; with more channels in than out, what follows the latents are those of a picture."""

    default_side, default_width, default_frames, default_text = 480, 832, 81, 512
    guidance_in = "two"
    fp32_latents = True
    makes_videos = rounds_frames = True

    def __init__(self, c: Config) -> None:
        if c.optional("image_dim") is not None or c.optional("added_kv_proj_dim") is not None:
            raise ConfigError(f"{c.where} has embeddings of an image ('image_dim'), which memcalc does not describe.")
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
        self.condition_embedder = ConditionEmbedder(width, c.integer("freq_dim"), self.text_width)
        inner, cross = c.integer("ffn_dim"), c.flag("cross_attn_norm", True)
        self.blocks = Stack(
            ["block"] * c.integer("num_layers"),
            lambda _: WanTransformerBlock(width, inner, heads, cross_norm=cross),
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
        grid = [size // step for size, step in zip(latents.shape[2:], self.patch, strict=True)]
        tables = self.rope(latents, prod(grid))
        hidden = self.patch_embedding(latents)
        hidden = ops.transpose(ops.view(hidden, *hidden.shape[:2], -1), 1, 2)
        hidden = ops.contiguous(hidden)
        temb, timestep_proj, encoder = self.condition_embedder(timestep, encoder)
        timestep_proj = ops.view(timestep_proj, batch, 6, -1)
        for block in self.blocks:
            hidden = block(hidden, encoder, timestep_proj, tables)
        shift, scale = ops.chunk(ops.add(self.scale_shift_table, ops.unsqueeze(temb, 1)), 2, 1)
        hidden = _in_fp32(self.norm_out, hidden, scale, shift)
        hidden = self.proj_out(hidden)
        hidden = ops.reshape(hidden, batch, *grid, *self.patch, -1)
        hidden = ops.permute(hidden, 0, 7, 1, 4, 2, 5, 3, 6)
        return ops.reshape(hidden, batch, self.out_channels, *latents.shape[2:])


_CHANNELS_OF_22 = 48
"""Latents of the autoencoder that Wan 2.2 brought, each of 16 pixels a side."""

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
