"""Chroma: FLUX.1 whose modulation comes from one small network for all blocks, with a mask over text and picture.

Source: diffusers 0.42.1, models/transformers/transformer_chroma.py.
"""

from __future__ import annotations

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.common.sizes import Shape
from memcalc.config.reader import Config
from memcalc.models.common.denoiser import Denoiser, Picture, PromptCall, given
from memcalc.models.families.diffusion.flux import FluxAttention, Tables
from memcalc.models.family import Family, table
from memcalc.nn.layers.diffusion import FeedForward, TextProjection, modulated, rotary_tables, timestep_embedding
from memcalc.nn.layers.diffusion_norms import RMSNorm
from memcalc.nn.layers.linear import Linear
from memcalc.nn.layers.norms import LayerNorm
from memcalc.nn.module import Buffer, Module
from memcalc.nn.run_context import run_context
from memcalc.nn.stack import Stack
from memcalc.tables.dtypes import FP16


def _flat(emb: Tensor) -> Tensor:
    """[b, parts, h] as [b, parts · h]."""
    return ops.reshape(emb, emb.shape[0], -1)


class PrunedNorm(Module):
    """LayerNorm shifted and scaled by the first two chunks of the conditioning; the others go with it."""

    scope = "norms"

    def __init__(self, width: int, parts: int) -> None:
        self.norm = LayerNorm(width, affine=False)
        self.parts = parts

    def forward(self, x: Tensor, emb: Tensor) -> tuple[Tensor, list[Tensor]]:
        """x [b, s, h] modulated, and the chunks [b, h] after shift and scale."""
        shift, scale, *rest = ops.chunk(_flat(emb), self.parts, 1)
        return modulated(self.norm(x), scale, shift), rest


def _joint(mask: Tensor | None) -> Tensor | None:
    """[b, s] as [b, 1, s, s]."""
    if mask is None:
        return None
    rows, columns = ops.unsqueeze(ops.unsqueeze(mask, 1), 1), ops.unsqueeze(ops.unsqueeze(mask, 1), -1)
    return ops.mul(rows, columns)


class ChromaTransformerBlock(Module):
    """Two streams with one attention."""

    scope = "residual stream"

    def __init__(self, width: int, heads: int, dim: int) -> None:
        self.norm1 = PrunedNorm(width, 6)
        self.norm1_context = PrunedNorm(width, 6)
        self.attn: Module = FluxAttention(width, heads, dim, added=True)
        self.norm2 = LayerNorm(width, affine=False)
        self.ff = FeedForward(width)
        self.norm2_context = LayerNorm(width, affine=False)
        self.ff_context = FeedForward(width)

    def forward(
        self, hidden: Tensor, encoder: Tensor, temb: Tensor, tables: Tables, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Text [b, t, h] and picture [b, s, h]."""
        temb_img, temb_txt = ops.narrow(temb, 1, 6), ops.narrow(temb, 1, 6)
        norm_hidden, (gate_msa, shift_mlp, scale_mlp, gate_mlp) = self.norm1(hidden, temb_img)
        norm_encoder, (c_gate_msa, c_shift_mlp, c_scale_mlp, c_gate_mlp) = self.norm1_context(encoder, temb_txt)
        mask = _joint(mask)
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


class ChromaSingleTransformerBlock(Module):
    """One stream of text and picture: attention and MLP beside each other."""

    scope = "residual stream"

    def __init__(self, width: int, heads: int, dim: int) -> None:
        self.norm = PrunedNorm(width, 3)
        self.proj_mlp = Linear(width, 4 * width, bias=True)
        self.proj_out = Linear(5 * width, width, bias=True)
        self.attn: Module = FluxAttention(width, heads, dim, added=False)

    def forward(self, hidden: Tensor, temb: Tensor, tables: Tables, mask: Tensor | None = None) -> Tensor:
        """[b, t + s, h] to the same."""
        residual = hidden
        norm_hidden, (gate,) = self.norm(hidden, temb)
        with hidden.tape.scoped("MLP"):
            mlp_hidden = ops.gelu(self.proj_mlp(norm_hidden))
        mask = _joint(mask)
        attn_output = self.attn(norm_hidden, None, tables, mask)
        hidden = ops.cat([attn_output, mlp_hidden], 2)
        gate = ops.unsqueeze(gate, 1)
        hidden = ops.mul(gate, self.proj_out(hidden))
        hidden = ops.add(residual, hidden)
        return ops.clamp(hidden) if hidden.dtype is FP16 else hidden


class ModulationInputs(Module):
    """What the approximator is told: the time step, and the place of each modulation."""

    scope = "embedding"

    def __init__(self, channels: int, places: int) -> None:
        self.channels = channels
        self.mod_proj = Buffer(places, 2 * channels)

    def forward(self, timestep: Tensor) -> Tensor:
        """[b] to [b, places, 4 · channels]."""
        batch, dtype = timestep.shape[0], timestep.dtype
        timesteps_proj = ops.to(timestep_embedding(timestep, self.channels), dtype)
        guidance_proj = timestep.tape.empty(timesteps_proj.shape, dtype)
        mod_proj = ops.repeat(ops.unsqueeze(ops.to(self.mod_proj, dtype), 0), batch, 1, 1)
        both = ops.unsqueeze(ops.cat([timesteps_proj, guidance_proj], 1), 1)
        return ops.cat([ops.repeat(both, 1, mod_proj.shape[1], 1), mod_proj], -1)


class Approximator(Module):
    """The network that gives the modulation of all blocks."""

    scope = "embedding"

    def __init__(self, inputs: int, width: int, hidden: int, depth: int) -> None:
        self.in_proj = Linear(inputs, hidden, bias=True)
        self.layers = [TextProjection(hidden, hidden) for _ in range(depth)]
        self.norms = [RMSNorm(hidden) for _ in range(depth)]
        self.out_proj = Linear(hidden, width, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        """[b, places, inputs] to [b, places, width]."""
        x = self.in_proj(x)
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = ops.add(x, layer(norm(x)))
        return self.out_proj(x)


class ChromaTransformer2DModel(Denoiser):
    """The denoiser of Chroma."""

    longest_text = 512
    default_text = 512
    guidance_in = "two"

    def __init__(self, c: Config) -> None:
        heads, dim = c.integer("num_attention_heads"), c.integer("attention_head_dim")
        width, self.channels, self.axes = heads * dim, c.integer("in_channels"), c.integers("axes_dims_rope")
        self.text_width, self.prompt_calls = c.integer("joint_attention_dim"), _PROMPT_CALLS
        double, single = c.integer("num_layers"), c.integer("num_single_layers")
        channels, depth = c.integer("approximator_num_channels"), c.integer("approximator_layers")
        self.time_text_embed = ModulationInputs(channels // 4, 3 * single + 12 * double + 2)
        self.distilled_guidance_layer = Approximator(channels, width, c.integer("approximator_hidden_dim"), depth)
        self.context_embedder = Linear(self.text_width, width, bias=True)
        self.x_embedder = Linear(self.channels, width, bias=True)
        self.transformer_blocks = Stack(
            ["double"] * double, lambda _: ChromaTransformerBlock(width, heads, dim), name="block"
        )
        self.single_transformer_blocks = Stack(
            ["single"] * single, lambda _: ChromaSingleTransformerBlock(width, heads, dim), name="single block"
        )
        self.norm_out = PrunedNorm(width, 2)
        self.proj_out = Linear(width, c.optional("out_channels") or self.channels, bias=True)

    def latent_shape(self, picture: Picture) -> Shape:
        """Squares of two by two latents are packed into channels."""
        return (picture.batch, (picture.latent_height // 2) * (picture.latent_width // 2), self.channels)

    def predict(self, latents: Tensor, picture: Picture) -> Tensor:
        """Packed latents [b, s, c] to the same."""
        tape, batch, text = latents.tape, picture.batch, picture.text
        timestep, encoder = given(tape, batch), given(tape, batch, text, self.text_width)
        img_ids, txt_ids = given(tape, latents.shape[1], 3), given(tape, text, 3)
        mask = given(tape, batch, text + latents.shape[1])
        hidden = self.x_embedder(latents)
        timestep = ops.mul_scalar(ops.to(timestep, hidden.dtype))
        input_vec = self.time_text_embed(timestep)
        pooled = self.distilled_guidance_layer(input_vec)
        encoder = self.context_embedder(encoder)
        ids = ops.cat([txt_ids, img_ids], 0)
        tables = rotary_tables(ids, self.axes)
        for block in self.transformer_blocks:
            temb = ops.cat([ops.narrow(pooled, 1, 6), ops.narrow(pooled, 1, 6)], 1)
            encoder, hidden = block(hidden, encoder, temb, tables, mask)
        hidden = ops.cat([encoder, hidden], 1)
        checkpointed = run_context(latents).checkpointing and tape.grad_enabled
        for block in self.single_transformer_blocks:
            temb = ops.narrow(pooled, 1, 3)
            hidden = block(hidden, temb, tables) if checkpointed else block(hidden, temb, tables, mask)
        hidden = ops.narrow(hidden, 1, hidden.shape[1] - text)
        temb = ops.narrow(pooled, 1, 2)
        hidden, _ = self.norm_out(hidden, temb)
        return self.proj_out(hidden)


_PROMPT_CALLS = {"T5EncoderModel": PromptCall(mask=True)}

DEFAULTS = {
    "patch_size": 1,
    "in_channels": 64,
    "out_channels": None,
    "num_layers": 19,
    "num_single_layers": 38,
    "attention_head_dim": 128,
    "num_attention_heads": 24,
    "joint_attention_dim": 4096,
    "axes_dims_rope": [16, 56, 56],
    "approximator_num_channels": 64,
    "approximator_hidden_dim": 5120,
    "approximator_layers": 5,
}

FAMILIES = table(
    Family(
        "ChromaTransformer2DModel",
        lambda c, _: ChromaTransformer2DModel(c),
        DEFAULTS,
        blocks="encoder",
        attention="sdpa",
        supports="training, inference, LoRA",
        verified="runs of diffusers on PyTorch's allocator",
    )
)
