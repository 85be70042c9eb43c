"""Blocks of FLUX.2: two streams with one attention, then one stream, modulated by one set of parameters.

Source: diffusers 0.42.1, models/transformers/transformer_flux2.py.
"""

from __future__ import annotations

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.nn.layers.diffusion import (
    NoDropout,
    TimestepEmbedding,
    apply_rotary_emb,
    native_attention,
    timestep_embedding,
)
from memcalc.nn.layers.diffusion_norms import RMSNorm
from memcalc.nn.layers.linear import Linear
from memcalc.nn.layers.norms import LayerNorm
from memcalc.nn.module import Module
from memcalc.tables.dtypes import FP16

Tables = tuple[Tensor, Tensor]


def _swiglu(x: Tensor) -> Tensor:
    """SiLU of the first half times the second."""
    half = x.shape[-1] // 2
    return ops.mul(ops.silu(ops.narrow(x, -1, half)), ops.narrow(x, -1, half))


class Flux2FeedForward(Module):
    """A gated MLP."""

    scope = "MLP"

    def __init__(self, width: int, inner: int) -> None:
        self.linear_in = Linear(width, 2 * inner)
        self.linear_out = Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] to [..., width]."""
        x = self.linear_in(x)
        x = _swiglu(x)
        out: Tensor = self.linear_out(x)
        return out


class Flux2Attention(Module):
    """Attention over text and picture together."""

    scope = "attention"

    def __init__(self, width: int, heads: int, dim: int) -> None:
        self.heads, self.dim = heads, dim
        self.to_q = Linear(width, width)
        self.to_k = Linear(width, width)
        self.to_v = Linear(width, width)
        self.norm_q = RMSNorm(dim)
        self.norm_k = RMSNorm(dim)
        self.to_out = [Linear(width, width), NoDropout()]
        self.norm_added_q = RMSNorm(dim)
        self.norm_added_k = RMSNorm(dim)
        self.add_q_proj = Linear(width, width)
        self.add_k_proj = Linear(width, width)
        self.add_v_proj = Linear(width, width)
        self.to_add_out = Linear(width, width)

    def _heads(self, x: Tensor) -> Tensor:
        return ops.view(x, *x.shape[:-1], self.heads, self.dim)

    def forward(self, hidden: Tensor, encoder: Tensor, tables: Tables) -> tuple[Tensor, Tensor]:
        """[b, s, h] and text [b, t, h] to the same."""
        query, key, value = self.to_q(hidden), self.to_k(hidden), self.to_v(hidden)
        encoder_query, encoder_key, encoder_value = (
            self.add_q_proj(encoder),
            self.add_k_proj(encoder),
            self.add_v_proj(encoder),
        )
        query, key, value = self._heads(query), self._heads(key), self._heads(value)
        query = self.norm_q(query)
        key = self.norm_k(key)
        encoder_query = self._heads(encoder_query)
        encoder_key = self._heads(encoder_key)
        encoder_value = self._heads(encoder_value)
        encoder_query = self.norm_added_q(encoder_query)
        encoder_key = self.norm_added_k(encoder_key)
        query = ops.cat([encoder_query, query], 1)
        key = ops.cat([encoder_key, key], 1)
        value = ops.cat([encoder_value, value], 1)
        query = apply_rotary_emb(query, tables)
        key = apply_rotary_emb(key, tables)
        hidden = native_attention(query, key, value)
        hidden = ops.reshape(hidden, *hidden.shape[:2], -1)
        hidden = ops.to(hidden, query.dtype)
        text, length = encoder.shape[1], hidden.shape[1]
        encoder, hidden = ops.narrow(hidden, 1, text), ops.narrow(hidden, 1, length - text)
        encoder = self.to_add_out(encoder)
        hidden = self.to_out[0](hidden)
        return hidden, encoder


class Flux2ParallelSelfAttention(Module):
    """Attention and MLP of one stream, projected together."""

    scope = "attention"

    def __init__(self, width: int, heads: int, dim: int, inner: int) -> None:
        self.heads, self.dim, self.width, self.inner = heads, dim, width, inner
        self.to_qkv_mlp_proj = Linear(width, 3 * width + 2 * inner)
        self.norm_q = RMSNorm(dim)
        self.norm_k = RMSNorm(dim)
        self.to_out = Linear(width + inner, width)

    def forward(self, hidden: Tensor, tables: Tables) -> Tensor:
        """[b, s, h] to the same."""
        hidden = self.to_qkv_mlp_proj(hidden)
        qkv, mlp_hidden = ops.split(hidden, [3 * self.width, 2 * self.inner], -1)
        query, key, value = ops.chunk(qkv, 3, -1)
        query, key, value = (ops.reshape(x, *x.shape[:-1], self.heads, self.dim) for x in (query, key, value))
        query = self.norm_q(query)
        key = self.norm_k(key)
        query = apply_rotary_emb(query, tables)
        key = apply_rotary_emb(key, tables)
        hidden = native_attention(query, key, value)
        hidden = ops.reshape(hidden, *hidden.shape[:2], -1)
        hidden = ops.to(hidden, query.dtype)
        mlp_hidden = _swiglu(mlp_hidden)
        hidden = ops.cat([hidden, mlp_hidden], -1)
        out: Tensor = self.to_out(hidden)
        return out


def _shifted(norm_hidden: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return ops.add(ops.mul(ops.add_scalar(scale), norm_hidden), shift)


def modulations(mod: Tensor, sets: int) -> list[Tensor]:
    """The chunks [b, 1, h] of a modulation [b, 3 · sets · h]: shift, scale and gate of each set."""
    mod = ops.unsqueeze(mod, 1)
    return ops.chunk(mod, 3 * sets, -1)


class Flux2TransformerBlock(Module):
    """Two streams with one attention."""

    scope = "residual stream"

    def __init__(self, width: int, heads: int, dim: int, inner: int) -> None:
        self.norm1 = LayerNorm(width, affine=False)
        self.norm1_context = LayerNorm(width, affine=False)
        self.attn = Flux2Attention(width, heads, dim)
        self.norm2 = LayerNorm(width, affine=False)
        self.ff = Flux2FeedForward(width, inner)
        self.norm2_context = LayerNorm(width, affine=False)
        self.ff_context = Flux2FeedForward(width, inner)

    def forward(
        self, hidden: Tensor, encoder: Tensor, temb_mod_img: Tensor, temb_mod_txt: Tensor, tables: Tables
    ) -> tuple[Tensor, Tensor]:
        """Text [b, t, h] and picture [b, s, h]."""
        shift_msa, scale_msa, gate_msa, shift_mlp, scale_mlp, gate_mlp = modulations(temb_mod_img, 2)
        c_shift_msa, c_scale_msa, c_gate_msa, c_shift_mlp, c_scale_mlp, c_gate_mlp = modulations(temb_mod_txt, 2)
        norm_hidden = self.norm1(hidden)
        norm_hidden = _shifted(norm_hidden, scale_msa, shift_msa)
        norm_encoder = self.norm1_context(encoder)
        norm_encoder = _shifted(norm_encoder, c_scale_msa, c_shift_msa)
        attention_outputs = self.attn(norm_hidden, norm_encoder, tables)
        attn_output, context_attn_output = attention_outputs
        attn_output = ops.mul(gate_msa, attn_output)
        hidden = ops.add(hidden, attn_output)
        norm_hidden = self.norm2(hidden)
        norm_hidden = ops.add(ops.mul(norm_hidden, ops.add_scalar(scale_mlp)), shift_mlp)
        ff_output = self.ff(norm_hidden)
        hidden = ops.add(hidden, ops.mul(gate_mlp, ff_output))
        context_attn_output = ops.mul(c_gate_msa, context_attn_output)
        encoder = ops.add(encoder, context_attn_output)
        norm_encoder = self.norm2_context(encoder)
        norm_encoder = ops.add(ops.mul(norm_encoder, ops.add_scalar(c_scale_mlp)), c_shift_mlp)
        context_ff_output = self.ff_context(norm_encoder)
        encoder = ops.add(encoder, ops.mul(c_gate_mlp, context_ff_output))
        if encoder.dtype is FP16:
            encoder = ops.clamp(encoder)
        return encoder, hidden


class Flux2SingleTransformerBlock(Module):
    """One stream of text and picture."""

    scope = "residual stream"

    def __init__(self, width: int, heads: int, dim: int, inner: int) -> None:
        self.norm = LayerNorm(width, affine=False)
        self.attn = Flux2ParallelSelfAttention(width, heads, dim, inner)

    def forward(self, hidden: Tensor, temb_mod: Tensor, tables: Tables) -> Tensor:
        """[b, s, h] to the same."""
        mod_shift, mod_scale, mod_gate = modulations(temb_mod, 1)
        norm_hidden = self.norm(hidden)
        norm_hidden = _shifted(norm_hidden, mod_scale, mod_shift)
        attn_output = self.attn(norm_hidden, tables)
        hidden = ops.add(hidden, ops.mul(mod_gate, attn_output))
        if hidden.dtype is FP16:
            hidden = ops.clamp(hidden)
        return hidden


class TimestepGuidanceEmbeddings(Module):
    """Time step, and guidance where the model is distilled for it."""

    def __init__(self, channels: int, width: int, *, guidance: bool) -> None:
        self.channels = channels
        self.timestep_embedder = TimestepEmbedding(channels, width, bias=False)
        if guidance:
            self.guidance_embedder = TimestepEmbedding(channels, width, bias=False)

    def forward(self, timestep: Tensor, guidance: Tensor | None) -> Tensor:
        """[b] and [b] or None to [b, width]."""
        timesteps_proj = timestep_embedding(timestep, self.channels)
        timesteps_emb: Tensor = self.timestep_embedder(ops.to(timesteps_proj, timestep.dtype))
        if guidance is None:
            return timesteps_emb
        guidance_proj = timestep_embedding(guidance, self.channels)
        guidance_emb = self.guidance_embedder(ops.to(guidance_proj, guidance.dtype))
        return ops.add(timesteps_emb, guidance_emb)


class Modulation(Module):
    """SiLU and a layer that gives shifts, scales and gates."""

    def __init__(self, width: int, sets: int) -> None:
        self.linear = Linear(width, 3 * sets * width)

    def forward(self, temb: Tensor) -> Tensor:
        """[b, h] to [b, 3 · sets · h]."""
        mod: Tensor = ops.silu(temb)
        out: Tensor = self.linear(mod)
        return out
