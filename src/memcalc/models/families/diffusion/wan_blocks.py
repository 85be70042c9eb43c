"""Blocks of Wan: norms and modulation in fp32, and attention over a text and over a picture.

Source: diffusers 0.42.1, models/transformers/transformer_wan.py.
"""

from __future__ import annotations

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.nn.layers.diffusion import (
    CaptionProjection,
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
from memcalc.tables.dtypes import FP32

Tables = tuple[Tensor, Tensor]

_TEXT_BEHIND_IMAGE = 512
"""Tokens of text, always, where there are tokens of a picture before them."""


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

    def __init__(self, width: int, heads: int, *, image: int | None = None) -> None:
        self.heads = heads
        self.to_q = Linear(width, width, bias=True)
        self.to_k = Linear(width, width, bias=True)
        self.to_v = Linear(width, width, bias=True)
        self.to_out = [Linear(width, width, bias=True), NoDropout()]
        self.norm_q = RMSNorm(width)
        self.norm_k = RMSNorm(width)
        self.looks = image is not None
        if image is not None:
            self.add_k_proj = Linear(image, width, bias=True)
            self.add_v_proj = Linear(image, width, bias=True)
            self.norm_added_k = RMSNorm(width)

    def _heads(self, x: Tensor) -> Tensor:
        return ops.reshape(x, *x.shape[:2], self.heads, -1)

    def forward(self, hidden: Tensor, encoder: Tensor | None, tables: Tables | None) -> Tensor:
        """[b, s, h] to the same."""
        encoder = hidden if encoder is None else encoder
        image = None
        if self.looks:
            length = encoder.shape[1] - _TEXT_BEHIND_IMAGE
            image, encoder = ops.narrow(encoder, 1, length), ops.narrow(encoder, 1, _TEXT_BEHIND_IMAGE)
        query, key, value = self.to_q(hidden), self.to_k(encoder), self.to_v(encoder)
        query = self.norm_q(query)
        key = self.norm_k(key)
        query = self._heads(query)
        key = self._heads(key)
        value = self._heads(value)
        if tables is not None:
            query = _rotated(query, tables)
            key = _rotated(key, tables)
        seen = None
        if image is not None:
            key_img, value_img = self.add_k_proj(image), self.add_v_proj(image)
            key_img = self.norm_added_k(key_img)
            key_img = self._heads(key_img)
            value_img = self._heads(value_img)
            seen = native_attention(query, key_img, value_img)
            seen = ops.reshape(seen, *seen.shape[:2], -1)
            seen = ops.to(seen, query.dtype)
        hidden = native_attention(query, key, value)
        hidden = ops.reshape(hidden, *hidden.shape[:2], -1)
        hidden = ops.to(hidden, query.dtype)
        if seen is not None:
            hidden = ops.add(hidden, seen)
        return self.to_out[0](hidden)  # type: ignore[no-any-return]


class WanTransformerBlock(Module):
    """Self-attention, cross-attention over the text, and an MLP."""

    scope = "residual stream"

    def __init__(self, width: int, inner: int, heads: int, *, cross_norm: bool, image: int | None) -> None:
        self.norm1 = FP32LayerNorm(width)
        self.attn1 = WanAttention(width, heads)
        self.attn2 = WanAttention(width, heads, image=image)
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
        norm_hidden = modulated_in_fp32(self.norm1, hidden, scale_msa, shift_msa)
        attn_output = self.attn1(norm_hidden, None, tables)
        hidden = ops.to(ops.add(ops.to(hidden, FP32), ops.mul(attn_output, gate_msa)), hidden.dtype)
        norm_hidden = ops.to(self.norm2(ops.to(hidden, FP32)), hidden.dtype)
        attn_output = self.attn2(norm_hidden, encoder, None)
        hidden = ops.add(hidden, attn_output)
        norm_hidden = modulated_in_fp32(self.norm3, hidden, c_scale_msa, c_shift_msa)
        ff_output = self.ffn(norm_hidden)
        return ops.to(ops.add(ops.to(hidden, FP32), ops.mul(ops.to(ff_output, FP32), c_gate_msa)), hidden.dtype)


def modulated_in_fp32(norm: Module, hidden: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """A norm in fp32, scaled and shifted there, and cast back."""
    out = ops.add(ops.mul(norm(ops.to(hidden, FP32)), ops.add_scalar(scale)), shift)
    return ops.to(out, hidden.dtype)


class ImageEmbedding(Module):
    """What an image encoder saw, between norms in fp32."""

    scope = "embedding"

    def __init__(self, inputs: int, width: int) -> None:
        self.norm1 = FP32LayerNorm(inputs, affine=True)
        self.ff = FeedForward(inputs, inputs, width)
        self.norm2 = FP32LayerNorm(width, affine=True)
        keep_in_fp32(self.norm1, self.norm2)

    def forward(self, image: Tensor) -> Tensor:
        """[b, i, inputs] to [b, i, width]."""
        hidden = self.norm1(image)
        hidden = self.ff(hidden)
        return self.norm2(hidden)


class ConditionEmbedder(Module):
    """Time step and text (WanTimeTextImageEmbedding)."""

    scope = "embedding"

    def __init__(self, width: int, freq: int, text: int, image: int | None) -> None:
        self.freq = freq
        self.time_embedder = TimestepEmbedding(freq, width)
        self.time_proj = Linear(width, 6 * width, bias=True)
        self.text_embedder = CaptionProjection(text, width)
        self.image_embedder = None if image is None else ImageEmbedding(image, width)
        keep_in_fp32(self.time_embedder)

    def forward(
        self, timestep: Tensor, encoder: Tensor, image: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """[b], [b, t, text] and [b, i, image] to [b, h], [b, 6 h], [b, t, h] and [b, i, h]."""
        timestep = timestep_embedding(timestep, self.freq)
        temb = ops.to(self.time_embedder(timestep), encoder.dtype)
        timestep_proj = self.time_proj(ops.silu(temb))
        encoder = self.text_embedder(encoder)
        if image is not None and self.image_embedder is not None:
            image = self.image_embedder(image)
        return temb, timestep_proj, encoder, image


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
