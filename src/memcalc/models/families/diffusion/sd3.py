"""Stable Diffusion 3 and 3.5: blocks with a stream for text and one for the picture; the last one drops the text.

Source: diffusers 0.42.1, models/transformers/transformer_sd3.py and JointTransformerBlock of models/attention.py.
"""

from __future__ import annotations

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.common.sizes import Shape
from memcalc.config.reader import Config
from memcalc.errors import UsageError
from memcalc.models.common.denoiser import CLIP_HIDDEN, LATENT_SCALE, Denoiser, Picture, PromptCall, given
from memcalc.models.family import Family, table
from memcalc.nn.layers.diffusion import (
    CombinedTimestepTextEmbedding,
    FeedForward,
    NoDropout,
    PatchProjection,
    modulated,
    unpatchified,
)
from memcalc.nn.layers.diffusion_norms import AdaLayerNormContinuous, AdaLayerNormZero, EagerRMSNorm
from memcalc.nn.layers.linear import Linear
from memcalc.nn.layers.norms import LayerNorm
from memcalc.nn.module import Buffer, Module
from memcalc.nn.stack import Stack
from memcalc.tables.dtypes import INT64


class JointAttention(Module):
    """Attention over picture and text together, or over the picture alone (the second one of SD 3.5)."""

    scope = "attention"

    def __init__(self, width: int, heads: int, *, added: bool, qk_norm: bool, drops_text: bool = False) -> None:
        self.heads, self.dim, self.drops_text = heads, width // heads, drops_text
        if qk_norm:
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
        if added and not drops_text:
            self.to_add_out = Linear(width, width, bias=True)
        if added and qk_norm:
            self.norm_added_q = EagerRMSNorm(self.dim)
            self.norm_added_k = EagerRMSNorm(self.dim)
        self.qk_norm = qk_norm

    def _heads(self, x: Tensor) -> Tensor:
        return ops.transpose(ops.view(x, x.shape[0], -1, self.heads, self.dim), 1, 2)

    def forward(self, hidden: Tensor, encoder: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """[b, s, h] (and text [b, t, h]) to the same."""
        residual = hidden
        query = self.to_q(hidden)
        key = self.to_k(hidden)
        value = self.to_v(hidden)
        query, key, value = self._heads(query), self._heads(key), self._heads(value)
        if self.qk_norm:
            query = self.norm_q(query)
            key = self.norm_k(key)
        if encoder is not None:
            text_query, text_key, text_value = (
                self.add_q_proj(encoder),
                self.add_k_proj(encoder),
                self.add_v_proj(encoder),
            )
            text_query, text_key, text_value = (self._heads(text_query), self._heads(text_key), self._heads(text_value))
            if self.qk_norm:
                text_query = self.norm_added_q(text_query)
                text_key = self.norm_added_k(text_key)
            query = ops.cat([query, text_query], 2)
            key = ops.cat([key, text_key], 2)
            value = ops.cat([value, text_value], 2)
        hidden = ops.scaled_dot_product_attention(query, key, value)
        hidden = ops.reshape(ops.transpose(hidden, 1, 2), hidden.shape[0], -1, self.heads * self.dim)
        hidden = ops.to(hidden, query.dtype)
        if encoder is None:
            return self.to_out[0](hidden)  # type: ignore[no-any-return]
        length = residual.shape[1]
        encoder = ops.narrow(hidden, 1, hidden.shape[1] - length)
        hidden = ops.narrow(hidden, 1, length)
        if not self.drops_text:
            encoder = self.to_add_out(encoder)
        hidden = self.to_out[0](hidden)
        return hidden, encoder


class DualAdaLayerNormZero(Module):
    """AdaLayerNormZero for two attentions (SD35AdaLayerNormZeroX)."""

    scope = "norms"

    def __init__(self, width: int) -> None:
        self.linear = Linear(width, 9 * width, bias=True)
        self.norm = LayerNorm(width, affine=False)

    def forward(self, hidden: Tensor, emb: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Both modulated states, and gate, shift, scale, gate and the second gate."""
        emb = self.linear(ops.silu(emb))
        chunks = ops.chunk(emb, 9, 1)
        norm_hidden = self.norm(hidden)
        hidden = modulated(norm_hidden, chunks[1], chunks[0])
        second = modulated(norm_hidden, chunks[7], chunks[6])
        return hidden, second, [*chunks[2:6], chunks[8]]


class JointTransformerBlock(Module):
    """Two streams, modulated by the conditioning, with one attention; `last` drops the text's."""

    scope = "residual stream"

    def __init__(self, width: int, heads: int, *, last: bool, dual: bool, qk_norm: bool) -> None:
        self.last, self.dual = last, dual
        self.norm1: Module = DualAdaLayerNormZero(width) if dual else AdaLayerNormZero(width)
        self.norm1_context: Module = AdaLayerNormContinuous(width, width) if last else AdaLayerNormZero(width)
        self.attn: Module = JointAttention(width, heads, added=True, qk_norm=qk_norm, drops_text=last)
        if dual:
            self.attn2: Module = JointAttention(width, heads, added=False, qk_norm=qk_norm)
        self.norm2 = LayerNorm(width, affine=False)
        self.ff = FeedForward(width)
        if not last:
            self.norm2_context = LayerNorm(width, affine=False)
            self.ff_context = FeedForward(width)

    def forward(self, hidden: Tensor, encoder: Tensor, temb: Tensor) -> tuple[Tensor | None, Tensor]:
        """Text [b, t, h] and picture [b, s, h]."""
        if self.dual:
            norm_hidden, norm_hidden2, gates = self.norm1(hidden, temb)
            gate_msa, shift_mlp, scale_mlp, gate_mlp, gate_msa2 = gates
            del gates
        else:
            norm_hidden, (gate_msa, shift_mlp, scale_mlp, gate_mlp) = self.norm1(hidden, temb)
        if self.last:
            norm_encoder = self.norm1_context(encoder, temb)
        else:
            norm_encoder, (c_gate_msa, c_shift_mlp, c_scale_mlp, c_gate_mlp) = self.norm1_context(encoder, temb)
        attn_output, context_attn_output = self.attn(norm_hidden, norm_encoder)
        attn_output = ops.mul(ops.unsqueeze(gate_msa, 1), attn_output)
        hidden = ops.add(hidden, attn_output)
        if self.dual:
            attn_output2 = self.attn2(norm_hidden2)
            attn_output2 = ops.mul(ops.unsqueeze(gate_msa2, 1), attn_output2)
            hidden = ops.add(hidden, attn_output2)
        norm_hidden = self.norm2(hidden)
        norm_hidden = modulated(norm_hidden, scale_mlp, shift_mlp)
        ff_output = self.ff(norm_hidden)
        ff_output = ops.mul(ops.unsqueeze(gate_mlp, 1), ff_output)
        hidden = ops.add(hidden, ff_output)
        if self.last:
            return None, hidden
        context_attn_output = ops.mul(ops.unsqueeze(c_gate_msa, 1), context_attn_output)
        encoder = ops.add(encoder, context_attn_output)
        norm_encoder = self.norm2_context(encoder)
        norm_encoder = modulated(norm_encoder, c_scale_mlp, c_shift_mlp)
        context_ff_output = self.ff_context(norm_encoder)
        encoder = ops.add(encoder, ops.mul(ops.unsqueeze(c_gate_mlp, 1), context_ff_output))
        return encoder, hidden


class CroppedPatchEmbed(PatchProjection):
    """Patches with a table of positions, a persistent buffer, from whose middle a rectangle is cut."""

    def __init__(self, channels: int, width: int, patch: int, largest: int) -> None:
        super().__init__(channels, width, patch)
        self.largest = largest
        self.pos_embed = Buffer(1, largest * largest, width)

    def forward(self, latent: Tensor) -> Tensor:
        """[b, c, h, w] to [b, patches, width]."""
        height, width = (side // self.patch for side in latent.shape[-2:])
        if max(height, width) > self.largest:
            raise UsageError(
                f"the model has positions for {self.largest} patches a side, and {max(height, width)} are asked for; "
                "lower --height and --width."
            )
        latent = self.patches(latent)
        table = ops.reshape(self.pos_embed, 1, self.largest, self.largest, -1)
        table = ops.narrow(ops.narrow(table, 1, height), 2, width)
        table = ops.reshape(table, 1, -1, table.shape[-1])
        return ops.to(ops.add(latent, table), latent.dtype)


_PROMPT_CALLS = {"CLIPTextModelWithProjection": CLIP_HIDDEN, "T5EncoderModel": PromptCall(fewer=77)}


class SD3Transformer2DModel(Denoiser):
    """The denoiser of Stable Diffusion 3 and 3.5."""

    longest_text = 512
    default_text = 333
    trains_with_fp32_vae = True
    prompt_calls = _PROMPT_CALLS

    def __init__(self, c: Config) -> None:
        self.default_side = LATENT_SCALE * c.integer("sample_size")
        heads, dim = c.integer("num_attention_heads"), c.integer("attention_head_dim")
        self.width = width = heads * dim
        self.channels, self.patch = c.integer("in_channels"), c.integer("patch_size")
        self.out_channels = c.optional("out_channels") or self.channels
        self.text_width, self.pooled = c.integer("joint_attention_dim"), c.integer("pooled_projection_dim")
        self.pos_embed = CroppedPatchEmbed(self.channels, width, self.patch, c.integer("pos_embed_max_size"))
        self.time_text_embed = CombinedTimestepTextEmbedding(width, self.pooled)
        self.context_embedder = Linear(self.text_width, c.integer("caption_projection_dim"), bias=True)
        depth, dual = c.integer("num_layers"), set(c.integers("dual_attention_layers"))
        qk_norm = c.get("qk_norm") is not None
        self.transformer_blocks = Stack(
            [(position == depth - 1, position in dual) for position in range(depth)],
            lambda i: JointTransformerBlock(width, heads, last=i == depth - 1, dual=i in dual, qk_norm=qk_norm),
            name="block",
        )
        self.norm_out = AdaLayerNormContinuous(width, width)
        self.proj_out = Linear(width, self.patch**2 * self.out_channels, bias=True)

    def latent_shape(self, picture: Picture) -> Shape:
        """[b, channels, h, w]."""
        return (picture.batch, self.channels, picture.latent_height, picture.latent_width)

    def predict(self, latents: Tensor, picture: Picture) -> Tensor:
        """[b, channels, h, w] to the same."""
        tape, batch = latents.tape, picture.batch
        timestep = given(tape, batch, dtype=INT64)
        text = given(tape, batch, picture.text, self.text_width)
        pooled = given(tape, batch, self.pooled)
        hidden = self.pos_embed(latents)
        hidden = ops.contiguous(hidden)
        temb = self.time_text_embed(timestep, None, pooled)
        text = self.context_embedder(text)
        encoder: Tensor | None = text
        del text
        for block in self.transformer_blocks:
            encoder, hidden = block(hidden, encoder, temb)
        hidden = self.norm_out(hidden, temb)
        hidden = self.proj_out(hidden)
        return unpatchified(hidden, picture.latent_height, picture.latent_width, self.patch, self.out_channels)


DEFAULTS = {
    "sample_size": 128,
    "patch_size": 2,
    "in_channels": 16,
    "num_layers": 18,
    "attention_head_dim": 64,
    "num_attention_heads": 18,
    "joint_attention_dim": 4096,
    "caption_projection_dim": 1152,
    "pooled_projection_dim": 2048,
    "out_channels": 16,
    "pos_embed_max_size": 96,
    "dual_attention_layers": [],
    "qk_norm": None,
}

FAMILIES = table(
    Family(
        "SD3Transformer2DModel",
        lambda c, _: SD3Transformer2DModel(c),
        DEFAULTS,
        blocks="encoder",
        attention="sdpa",
        supports="training, inference, LoRA",
        verified="runs of diffusers on PyTorch's allocator",
    )
)
