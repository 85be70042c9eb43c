"""Blocks of HunyuanVideo: two streams, one stream, and the refiner of the text.

Source: diffusers 0.42.1, models/transformers/transformer_hunyuan_video.py.
"""

from __future__ import annotations

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.nn.layers.diffusion import (
    FeedForward,
    NoDropout,
    TextProjection,
    TimestepEmbedding,
    apply_rotary_emb,
    modulated,
    native_attention,
    timestep_embedding,
)
from memcalc.nn.layers.diffusion_blocks import CrossAttention
from memcalc.nn.layers.diffusion_norms import AdaLayerNormZero, EagerRMSNorm
from memcalc.nn.layers.linear import Linear
from memcalc.nn.layers.norms import LayerNorm
from memcalc.nn.module import Module
from memcalc.tables.dtypes import BOOL, FP32

Tables = tuple[Tensor, Tensor]


class HunyuanAttention(Module):
    """Attention over video and text, each with its projections (`added`), or over one stream that holds both."""

    scope = "attention"

    def __init__(self, width: int, heads: int, *, added: bool) -> None:
        self.heads, self.dim, self.added = heads, width // heads, added
        self.norm_q = EagerRMSNorm(self.dim)
        self.norm_k = EagerRMSNorm(self.dim)
        self.to_q = Linear(width, width, bias=True)
        self.to_k = Linear(width, width, bias=True)
        self.to_v = Linear(width, width, bias=True)
        if added:
            self.add_k_proj = Linear(width, width, bias=True)
            self.add_v_proj = Linear(width, width, bias=True)
            self.add_q_proj = Linear(width, width, bias=True)
            self.to_out = [Linear(width, width, bias=True), NoDropout()]
            self.to_add_out = Linear(width, width, bias=True)
            self.norm_added_q = EagerRMSNorm(self.dim)
            self.norm_added_k = EagerRMSNorm(self.dim)

    def _heads(self, x: Tensor) -> Tensor:
        return ops.reshape(x, *x.shape[:2], self.heads, self.dim)

    def forward(self, hidden: Tensor, encoder: Tensor, mask: Tensor, tables: Tables) -> tuple[Tensor, Tensor]:
        """Video [b, s, h] and text [b, t, h] to the same."""
        text = encoder.shape[1]
        if not self.added:
            hidden = ops.cat([hidden, encoder], 1)
        query, key, value = self.to_q(hidden), self.to_k(hidden), self.to_v(hidden)
        query, key, value = self._heads(query), self._heads(key), self._heads(value)
        query = self.norm_q(query)
        key = self.norm_k(key)
        if self.added:
            query = apply_rotary_emb(query, tables)
            key = apply_rotary_emb(key, tables)
            encoder_query = self.add_q_proj(encoder)
            encoder_key = self.add_k_proj(encoder)
            encoder_value = self.add_v_proj(encoder)
            encoder_query = self._heads(encoder_query)
            encoder_key = self._heads(encoder_key)
            encoder_value = self._heads(encoder_value)
            encoder_query = self.norm_added_q(encoder_query)
            encoder_key = self.norm_added_k(encoder_key)
            query = ops.cat([query, encoder_query], 1)
            key = ops.cat([key, encoder_key], 1)
            value = ops.cat([value, encoder_value], 1)
        else:
            query = _partly_rotated(query, text, tables)
            key = _partly_rotated(key, text, tables)
        hidden = native_attention(query, key, value, mask)
        hidden = ops.reshape(hidden, *hidden.shape[:2], -1)
        hidden = ops.to(hidden, query.dtype)
        hidden, encoder = _divided(hidden, text)
        if self.added:
            hidden = self.to_out[0](hidden)
            encoder = self.to_add_out(encoder)
        return hidden, encoder


def _partly_rotated(x: Tensor, text: int, tables: Tables) -> Tensor:
    """The video's part turned, put before that of the text."""
    video, rest = _divided(x, text)
    return ops.cat([apply_rotary_emb(video, tables), rest], 1)


def _divided(x: Tensor, text: int) -> tuple[Tensor, Tensor]:
    """[b, s + t, ...] as video and text, views."""
    return ops.narrow(x, 1, x.shape[1] - text), ops.narrow(x, 1, text)


class HunyuanVideoTransformerBlock(Module):
    """Two streams with one attention."""

    scope = "residual stream"

    def __init__(self, width: int, heads: int, inner: int) -> None:
        self.norm1 = AdaLayerNormZero(width)
        self.norm1_context = AdaLayerNormZero(width)
        self.attn = HunyuanAttention(width, heads, added=True)
        self.norm2 = LayerNorm(width, affine=False)
        self.ff = FeedForward(width, inner)
        self.norm2_context = LayerNorm(width, affine=False)
        self.ff_context = FeedForward(width, inner)

    def forward(
        self, hidden: Tensor, encoder: Tensor, temb: Tensor, mask: Tensor, tables: Tables
    ) -> tuple[Tensor, Tensor]:
        """Video [b, s, h] and text [b, t, h] to the same."""
        norm_hidden, (gate_msa, shift_mlp, scale_mlp, gate_mlp) = self.norm1(hidden, temb)
        norm_encoder, (c_gate_msa, c_shift_mlp, c_scale_mlp, c_gate_mlp) = self.norm1_context(encoder, temb)
        attn_output, context_attn_output = self.attn(norm_hidden, norm_encoder, mask, tables)
        hidden = ops.add(hidden, ops.mul(attn_output, ops.unsqueeze(gate_msa, 1)))
        encoder = ops.add(encoder, ops.mul(context_attn_output, ops.unsqueeze(c_gate_msa, 1)))
        norm_hidden = self.norm2(hidden)
        norm_encoder = self.norm2_context(encoder)
        norm_hidden = modulated(norm_hidden, scale_mlp, shift_mlp)
        norm_encoder = modulated(norm_encoder, c_scale_mlp, c_shift_mlp)
        ff_output = self.ff(norm_hidden)
        context_ff_output = self.ff_context(norm_encoder)
        hidden = ops.add(hidden, ops.mul(ops.unsqueeze(gate_mlp, 1), ff_output))
        encoder = ops.add(encoder, ops.mul(ops.unsqueeze(c_gate_mlp, 1), context_ff_output))
        return hidden, encoder


class HunyuanVideoSingleTransformerBlock(Module):
    """One stream for both, with attention and MLP side by side."""

    scope = "residual stream"

    def __init__(self, width: int, heads: int, inner: int) -> None:
        self.attn = HunyuanAttention(width, heads, added=False)
        self.norm = AdaLayerNormZero(width, 3)
        self.proj_mlp = Linear(width, inner, bias=True)
        self.proj_out = Linear(width + inner, width, bias=True)

    def forward(
        self, hidden: Tensor, encoder: Tensor, temb: Tensor, mask: Tensor, tables: Tables
    ) -> tuple[Tensor, Tensor]:
        """Video [b, s, h] and text [b, t, h] to the same."""
        text = encoder.shape[1]
        hidden = ops.cat([hidden, encoder], 1)
        residual = hidden
        norm_hidden, (gate,) = self.norm(hidden, temb)
        with hidden.tape.scoped("MLP"):
            mlp_hidden = ops.gelu(self.proj_mlp(norm_hidden))
        norm_hidden, norm_encoder = _divided(norm_hidden, text)
        attn_output, context_attn_output = self.attn(norm_hidden, norm_encoder, mask, tables)
        attn_output = ops.cat([attn_output, context_attn_output], 1)
        hidden = ops.cat([attn_output, mlp_hidden], 2)
        hidden = ops.mul(ops.unsqueeze(gate, 1), self.proj_out(hidden))
        hidden = ops.add(hidden, residual)
        return _divided(hidden, text)


class LinearActivation(Module):
    """A linear layer and SiLU."""

    def __init__(self, width: int, inner: int) -> None:
        self.proj = Linear(width, inner, bias=True)

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., width] to [..., inner]."""
        hidden = self.proj(hidden)
        return ops.silu(hidden)


class SiluFeedForward(Module):
    """diffusers' FeedForward with a linear layer and SiLU."""

    scope = "MLP"

    def __init__(self, width: int, inner: int) -> None:
        self.net = [LinearActivation(width, inner), NoDropout(), Linear(inner, width, bias=True)]

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., width] to the same."""
        for module in self.net:
            hidden = module(hidden)
        return hidden


class AdaNorm(Module):
    """Two gates of the conditioning."""

    def __init__(self, width: int) -> None:
        self.linear = Linear(width, 2 * width, bias=True)

    def forward(self, temb: Tensor) -> tuple[Tensor, Tensor]:
        """[b, h] to two of [b, 1, h]."""
        temb = self.linear(ops.silu(temb))
        gate_msa, gate_mlp = ops.chunk(temb, 2, 1)
        return ops.unsqueeze(gate_msa, 1), ops.unsqueeze(gate_mlp, 1)


class RefinerBlock(Module):
    """Self-attention and an MLP over the text, gated by the conditioning."""

    scope = "residual stream"

    def __init__(self, width: int, heads: int) -> None:
        self.norm1 = LayerNorm(width)
        self.attn = CrossAttention(width, heads, bias=True)
        self.norm2 = LayerNorm(width)
        self.ff = SiluFeedForward(width, 4 * width)
        self.norm_out = AdaNorm(width)

    def forward(self, hidden: Tensor, temb: Tensor, mask: Tensor) -> Tensor:
        """[b, t, h] to the same."""
        norm_hidden = self.norm1(hidden)
        attn_output = self.attn(norm_hidden, None, mask)
        gate_msa, gate_mlp = self.norm_out(temb)
        hidden = ops.add(hidden, ops.mul(attn_output, gate_msa))
        ff_output = self.ff(self.norm2(hidden))
        return ops.add(hidden, ops.mul(ff_output, gate_mlp))


class TimeText(Module):
    """Time step and a pooled text, and guidance where the model is distilled for it."""

    scope = "embedding"

    def __init__(self, width: int, pooled: int, *, guidance: bool = False) -> None:
        self.timestep_embedder = TimestepEmbedding(256, width)
        self.text_embedder = TextProjection(pooled, width)
        self.guidance_embedder = TimestepEmbedding(256, width) if guidance else None

    def forward(self, timestep: Tensor, pooled: Tensor, guidance: Tensor | None = None) -> Tensor:
        """[b], [b, pooled] and [b] to [b, width]."""
        timesteps_proj = timestep_embedding(timestep, 256)
        timesteps_emb = self.timestep_embedder(ops.to(timesteps_proj, pooled.dtype))
        pooled_projections = self.text_embedder(pooled)
        if self.guidance_embedder is None or guidance is None:
            return ops.add(timesteps_emb, pooled_projections)
        guidance_proj = timestep_embedding(guidance, 256)
        guidance_emb = self.guidance_embedder(ops.to(guidance_proj, pooled.dtype))
        return ops.add(ops.add(timesteps_emb, guidance_emb), pooled_projections)


class IndividualTokenRefiner(Module):
    """The blocks of the refiner, in which every token sees those that are no padding."""

    def __init__(self, width: int, heads: int, depth: int) -> None:
        self.refiner_blocks = [RefinerBlock(width, heads) for _ in range(depth)]

    def forward(self, hidden: Tensor, temb: Tensor, mask: Tensor) -> Tensor:
        """[b, t, h] to the same."""
        batch, length = mask.shape
        mask = ops.to(mask, BOOL)
        first = ops.repeat(ops.view(mask, batch, 1, 1, length), 1, 1, length, 1)
        both = ops.compare(first, ops.transpose(first, 2, 3))
        for block in self.refiner_blocks:
            hidden = block(hidden, temb, both)
        return hidden


class TokenRefiner(Module):
    """The text, projected and refined by blocks of its own."""

    scope = "text refiner"

    def __init__(self, text: int, width: int, heads: int, depth: int) -> None:
        self.time_text_embed = TimeText(width, text)
        self.proj_in = Linear(text, width, bias=True)
        self.token_refiner = IndividualTokenRefiner(width, heads, depth)

    def forward(self, hidden: Tensor, timestep: Tensor, mask: Tensor) -> Tensor:
        """[b, t, text] to [b, t, h]."""
        mask_float = ops.unsqueeze(ops.to(mask, FP32), -1)
        pooled = ops.div(ops.sum(ops.mul(hidden, mask_float), 1), ops.sum(mask_float, 1))
        pooled = ops.to(pooled, hidden.dtype)
        temb = self.time_text_embed(timestep, pooled)
        hidden = self.proj_in(hidden)
        return self.token_refiner(hidden, temb, mask)
