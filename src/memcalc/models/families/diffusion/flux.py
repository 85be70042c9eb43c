"""FLUX.1: blocks with a stream for text and one for the picture, then blocks with one stream.

Source: diffusers 0.42.1, models/transformers/transformer_flux.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from memcalc import ops
from memcalc.autograd.tape import Tape
from memcalc.autograd.tensor import Tensor
from memcalc.common.sizes import Shape
from memcalc.config.reader import Config
from memcalc.models.common.denoiser import CLIP, Denoiser, Picture, PromptCall, given
from memcalc.models.family import Family, table
from memcalc.nn.layers.diffusion import (
    CombinedTimestepTextEmbedding,
    FeedForward,
    NoDropout,
    apply_rotary_emb,
    modulated,
    native_attention,
    rotary_tables,
)
from memcalc.nn.layers.diffusion_norms import AdaLayerNormContinuous, AdaLayerNormZero, RMSNorm
from memcalc.nn.layers.linear import Linear
from memcalc.nn.layers.norms import LayerNorm
from memcalc.nn.module import Module
from memcalc.nn.stack import Stack
from memcalc.tables.dtypes import FP16, FP32

Tables = tuple[Tensor, Tensor]


class FluxAttention(Module):
    """Attention over text and picture together (`added`), or over one stream that holds both."""

    scope = "attention"

    def __init__(self, width: int, heads: int, dim: int, *, added: bool) -> None:
        self.heads, self.dim, self.added = heads, dim, added
        self.norm_q = RMSNorm(dim)
        self.norm_k = RMSNorm(dim)
        self.to_q = Linear(width, width, bias=True)
        self.to_k = Linear(width, width, bias=True)
        self.to_v = Linear(width, width, bias=True)
        if added:
            self.to_out = [Linear(width, width, bias=True), NoDropout()]
            self.norm_added_q = RMSNorm(dim)
            self.norm_added_k = RMSNorm(dim)
            self.add_q_proj = Linear(width, width, bias=True)
            self.add_k_proj = Linear(width, width, bias=True)
            self.add_v_proj = Linear(width, width, bias=True)
            self.to_add_out = Linear(width, width, bias=True)

    def _heads(self, x: Tensor) -> Tensor:
        return ops.view(x, *x.shape[:-1], self.heads, self.dim)

    def forward(
        self, hidden: Tensor, encoder: Tensor | None, tables: Tables, mask: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """[b, s, h] (and text [b, t, h]) to the same."""
        query, key, value = self.to_q(hidden), self.to_k(hidden), self.to_v(hidden)
        encoder_query = encoder_key = encoder_value = None
        if encoder is not None:
            encoder_query, encoder_key, encoder_value = (
                self.add_q_proj(encoder),
                self.add_k_proj(encoder),
                self.add_v_proj(encoder),
            )
        query = self._heads(query)
        key = self._heads(key)
        value = self._heads(value)
        query = self.norm_q(query)
        key = self.norm_k(key)
        if encoder_query is not None and encoder_key is not None and encoder_value is not None:
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
        hidden = native_attention(query, key, value, mask)
        hidden = ops.reshape(hidden, *hidden.shape[:2], -1)
        hidden = ops.to(hidden, query.dtype)
        if encoder is None:
            return hidden
        text, length = encoder.shape[1], hidden.shape[1]
        encoder, hidden = ops.narrow(hidden, 1, text), ops.narrow(hidden, 1, length - text)
        hidden = self.to_out[0](ops.contiguous(hidden))
        encoder = self.to_add_out(ops.contiguous(encoder))
        return hidden, encoder


class FluxTransformerBlock(Module):
    """Two streams, modulated by the conditioning, with one attention."""

    scope = "residual stream"

    def __init__(self, width: int, heads: int, dim: int) -> None:
        self.norm1 = AdaLayerNormZero(width)
        self.norm1_context = AdaLayerNormZero(width)
        self.attn: Module = FluxAttention(width, heads, dim, added=True)
        self.norm2 = LayerNorm(width, affine=False)
        self.ff = FeedForward(width)
        self.norm2_context = LayerNorm(width, affine=False)
        self.ff_context = FeedForward(width)

    def forward(
        self, hidden: Tensor, encoder: Tensor, temb: Tensor, tables: Tables, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Text [b, t, h] and picture [b, s, h]."""
        norm_hidden, (gate_msa, shift_mlp, scale_mlp, gate_mlp) = self.norm1(hidden, temb)
        norm_encoder, (c_gate_msa, c_shift_mlp, c_scale_mlp, c_gate_mlp) = self.norm1_context(encoder, temb)
        attention_outputs = self.attn(norm_hidden, norm_encoder, tables, mask)
        attn_output, context_attn_output = attention_outputs
        attn_output = ops.mul(ops.unsqueeze(gate_msa, 1), attn_output)
        hidden = ops.add(hidden, attn_output)
        norm_hidden = self.norm2(hidden)
        norm_hidden = modulated(norm_hidden, scale_mlp, shift_mlp)
        ff_output = self.ff(norm_hidden)
        ff_output = ops.mul(ops.unsqueeze(gate_mlp, 1), ff_output)
        hidden = ops.add(hidden, ff_output)
        context_attn_output = ops.mul(ops.unsqueeze(c_gate_msa, 1), context_attn_output)
        encoder = ops.add(encoder, context_attn_output)
        norm_encoder = self.norm2_context(encoder)
        norm_encoder = modulated(norm_encoder, c_scale_mlp, c_shift_mlp)
        context_ff_output = self.ff_context(norm_encoder)
        encoder = ops.add(encoder, ops.mul(ops.unsqueeze(c_gate_mlp, 1), context_ff_output))
        if encoder.dtype is FP16:
            encoder = ops.clamp(encoder)
        return encoder, hidden


class FluxSingleTransformerBlock(Module):
    """One stream of text and picture: attention and MLP beside each other."""

    scope = "residual stream"

    def __init__(self, width: int, heads: int, dim: int, ratio: int = 4) -> None:
        self.norm = AdaLayerNormZero(width, 3)
        self.proj_mlp = Linear(width, ratio * width, bias=True)
        self.proj_out = Linear((1 + ratio) * width, width, bias=True)
        self.attn: Module = FluxAttention(width, heads, dim, added=False)

    def forward(
        self, hidden: Tensor, encoder: Tensor, temb: Tensor, tables: Tables, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Text [b, t, h] and picture [b, s, h]."""
        text = encoder.shape[1]
        hidden = ops.cat([encoder, hidden], 1)
        residual = hidden
        norm_hidden, (gate,) = self.norm(hidden, temb)
        with hidden.tape.scoped("MLP"):
            mlp_hidden = ops.gelu(self.proj_mlp(norm_hidden))
        attn_output = self.attn(norm_hidden, None, tables, mask)
        hidden = ops.cat([attn_output, mlp_hidden], 2)
        gate = ops.unsqueeze(gate, 1)
        hidden = ops.mul(gate, self.proj_out(hidden))
        hidden = ops.add(residual, hidden)
        if hidden.dtype is FP16:
            hidden = ops.clamp(hidden)
        return ops.narrow(hidden, 1, text), ops.narrow(hidden, 1, hidden.shape[1] - text)


_PROMPT_CALLS = {"CLIPTextModel": CLIP, "T5EncoderModel": PromptCall()}


@dataclass(frozen=True, eq=False)
class Inputs:
    """What FLUX.1 is given beside the latents: time steps, text, positions, the text's vector, and guidance."""

    timestep: Tensor
    encoder: Tensor
    img_ids: Tensor
    txt_ids: Tensor
    pooled: Tensor
    guidance: Tensor | None


Residuals = tuple[Sequence[Tensor], Sequence[Tensor]]
"""What a ControlNet adds behind double blocks and behind single ones."""


class FluxTransformer2DModel(Denoiser):
    """The denoiser of FLUX.1."""

    longest_text = 512
    default_text = 512
    guidance_in = "none"
    prompt_calls = _PROMPT_CALLS
    trained_encoders = ("CLIPTextModel",)
    told_pooled_alone = True
    channels_at, takes_images = 2, True

    def __init__(self, c: Config) -> None:
        heads, dim = c.integer("num_attention_heads"), c.integer("attention_head_dim")
        self.width = width = heads * dim
        self.channels, self.axes = c.integer("in_channels"), c.integers("axes_dims_rope")
        outputs = c.optional("out_channels") or self.channels
        self.conditioned = max(self.channels - outputs, 0)
        self.text_width, self.pooled = c.integer("joint_attention_dim"), c.integer("pooled_projection_dim")
        self.guidance = c.flag("guidance_embeds")
        self.time_text_embed = CombinedTimestepTextEmbedding(width, self.pooled, guidance=self.guidance)
        self.context_embedder = Linear(self.text_width, width, bias=True)
        self.x_embedder = Linear(self.channels, width, bias=True)
        double, single = c.integer("num_layers"), c.integer("num_single_layers")
        self.transformer_blocks = Stack(
            ["double"] * double, lambda _: FluxTransformerBlock(width, heads, dim), name="block"
        )
        self.single_transformer_blocks = Stack(
            ["single"] * single, lambda _: FluxSingleTransformerBlock(width, heads, dim), name="single block"
        )
        self.norm_out = AdaLayerNormContinuous(width, width)
        self.proj_out = Linear(width, outputs, bias=True)

    def latent_shape(self, picture: Picture) -> Shape:
        """Squares of two by two latents are packed into channels."""
        return (picture.batch, (picture.latent_height // 2) * (picture.latent_width // 2), self.channels)

    def predict(self, latents: Tensor, picture: Picture) -> Tensor:
        """Packed latents [b, s, c] to the same."""
        return self.run(latents, self.inputs(latents.tape, picture))

    def inputs(self, tape: Tape, picture: Picture) -> Inputs:
        """What it is given beside the latents."""
        batch, text = picture.batch, picture.text
        timestep, encoder = given(tape, batch), given(tape, batch, text, self.text_width)
        tokens = (1 + picture.images) * self.latent_shape(picture)[1]
        img_ids, txt_ids = given(tape, tokens, 3), given(tape, text, 3)
        pooled = self.told(tape, "pooled", batch, self.pooled)
        return Inputs(
            timestep, encoder, img_ids, txt_ids, pooled, given(tape, batch, dtype=FP32) if self.guidance else None
        )

    def embedded(self, hidden: Tensor, inputs: Inputs) -> tuple[Tensor, ...]:
        """Conditioning [b, h] and text [b, t, h]; and what stays besides."""
        guidance = inputs.guidance
        timestep = ops.mul_scalar(ops.to(inputs.timestep, hidden.dtype))
        if guidance is not None:
            guidance = ops.mul_scalar(ops.to(guidance, hidden.dtype))
        temb = self.time_text_embed(timestep, guidance, inputs.pooled)
        encoder = self.context_embedder(inputs.encoder)
        return temb, encoder, timestep, *([] if guidance is None else [guidance])

    def run(self, latents: Tensor, inputs: Inputs, residuals: Residuals = ((), ())) -> Tensor:
        """The prediction. `residuals` of a ControlNet are added behind blocks, each behind several."""
        hidden = self.x_embedder(latents)
        temb, encoder, *stays = self.embedded(hidden, inputs)
        ids = ops.cat([inputs.txt_ids, inputs.img_ids], 0)
        tables = rotary_tables(ids, self.axes)
        for blocks, added in zip((self.transformer_blocks, self.single_transformer_blocks), residuals, strict=True):
            for index, block in enumerate(blocks):
                encoder, hidden = block(hidden, encoder, temb, tables)
                if added:  # then every block is traced
                    hidden = ops.add(hidden, added[index // ceil(blocks.depth / len(added))])
        hidden = self.norm_out(hidden, temb)
        output: Tensor = self.proj_out(hidden)
        del stays
        return output


DEFAULTS = {
    "patch_size": 1,
    "in_channels": 64,
    "num_layers": 19,
    "num_single_layers": 38,
    "attention_head_dim": 128,
    "num_attention_heads": 24,
    "joint_attention_dim": 4096,
    "pooled_projection_dim": 768,
    "guidance_embeds": False,
    "axes_dims_rope": [16, 56, 56],
}

FAMILIES = table(
    Family(
        "FluxTransformer2DModel",
        lambda c, _: FluxTransformer2DModel(c),
        DEFAULTS,
        blocks="encoder",
        attention="sdpa",
        supports="training, inference, LoRA",
        verified="runs of diffusers on PyTorch's allocator",
    )
)
