"""Blocks of CogVideoX: text and video in one attention, norms that a time step modulates, and patches.

Source: diffusers 0.42.1, models/transformers/cogvideox_transformer_3d.py, models/embeddings.py (CogVideoXPatchEmbed).
"""

from __future__ import annotations

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.config.reader import Config
from memcalc.errors import UsageError
from memcalc.nn.layers.diffusion import Convolution, FeedForward, NoDropout, apply_rotary_emb
from memcalc.nn.layers.linear import Linear
from memcalc.nn.layers.norms import LayerNorm
from memcalc.nn.module import Buffer, Module
from memcalc.tables.dtypes import FP64

Tables = tuple[Tensor, Tensor]


class CogVideoXLayerNormZero(Module):
    """One LayerNorm for video and text, each scaled and shifted by the conditioning, which gives gates too."""

    scope = "norms"

    def __init__(self, conditioning: int, width: int, *, affine: bool) -> None:
        self.linear = Linear(conditioning, 6 * width, bias=True)
        self.norm = LayerNorm(width, affine=affine)

    def forward(self, hidden: Tensor, encoder: Tensor, temb: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Video [b, s, h] and text [b, t, h] modulated, and a gate [b, 1, h] for each."""
        shift, scale, gate, enc_shift, enc_scale, enc_gate = ops.chunk(self.linear(ops.silu(temb)), 6, 1)
        hidden = self._modulated(hidden, scale, shift)
        encoder = self._modulated(encoder, enc_scale, enc_shift)
        return hidden, encoder, ops.unsqueeze(gate, 1), ops.unsqueeze(enc_gate, 1)

    def _modulated(self, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        return ops.add(ops.mul(self.norm(x), ops.unsqueeze(ops.add_scalar(scale), 1)), ops.unsqueeze(shift, 1))


class CogVideoXAttention(Module):
    """Attention over text and video together, with a LayerNorm of each head's queries and keys."""

    scope = "attention"

    def __init__(self, width: int, heads: int, *, bias: bool) -> None:
        self.heads, dim = heads, width // heads
        self.norm_q = LayerNorm(dim)
        self.norm_k = LayerNorm(dim)
        self.to_q = Linear(width, width, bias=bias)
        self.to_k = Linear(width, width, bias=bias)
        self.to_v = Linear(width, width, bias=bias)
        self.to_out = [Linear(width, width, bias=True), NoDropout()]

    def _heads(self, x: Tensor) -> Tensor:
        return ops.transpose(ops.view(x, *x.shape[:2], self.heads, -1), 1, 2)

    def forward(self, hidden: Tensor, encoder: Tensor, tables: Tables | None) -> tuple[Tensor, Tensor]:
        """Video [b, s, h] and text [b, t, h] to the same."""
        text = encoder.shape[1]
        hidden = ops.cat([encoder, hidden], 1)
        query, key, value = self.to_q(hidden), self.to_k(hidden), self.to_v(hidden)
        query = self._heads(query)
        key = self._heads(key)
        value = self._heads(value)
        query = self.norm_q(query)
        key = self.norm_k(key)
        if tables is not None:
            query = _video_rotated(query, text, tables)
            key = _video_rotated(key, text, tables)
        hidden = ops.scaled_dot_product_attention(query, key, value)
        hidden = ops.reshape(ops.transpose(hidden, 1, 2), *encoder.shape[:1], -1, encoder.shape[2])
        hidden = self.to_out[0](hidden)
        encoder, hidden = ops.split(hidden, [text, hidden.shape[1] - text], 1)
        return hidden, encoder


def _video_rotated(x: Tensor, text: int, tables: Tables) -> Tensor:
    """x [b, heads, t + s, d] with what is behind the text turned in place."""
    video = ops.narrow(x, 2, x.shape[2] - text)
    return ops.copy_slice_(x, apply_rotary_emb(video, tables, sequence_dim=2))


class CogVideoXBlock(Module):
    """Attention over text and video, and an MLP over both."""

    scope = "residual stream"

    def __init__(self, c: Config, width: int, heads: int) -> None:
        conditioning, affine = c.integer("time_embed_dim"), c.flag("norm_elementwise_affine", True)
        self.norm1 = CogVideoXLayerNormZero(conditioning, width, affine=affine)
        self.attn1 = CogVideoXAttention(width, heads, bias=c.flag("attention_bias", True))
        self.norm2 = CogVideoXLayerNormZero(conditioning, width, affine=affine)
        self.ff = FeedForward(width)

    def forward(self, hidden: Tensor, encoder: Tensor, temb: Tensor, tables: Tables | None) -> tuple[Tensor, Tensor]:
        """Video [b, s, h] and text [b, t, h] to the same."""
        text = encoder.shape[1]
        norm_hidden, norm_encoder, gate_msa, enc_gate_msa = self.norm1(hidden, encoder, temb)
        attn_hidden, attn_encoder = self.attn1(norm_hidden, norm_encoder, tables)
        hidden = ops.add(hidden, ops.mul(gate_msa, attn_hidden))
        encoder = ops.add(encoder, ops.mul(enc_gate_msa, attn_encoder))
        norm_hidden, norm_encoder, gate_ff, enc_gate_ff = self.norm2(hidden, encoder, temb)
        norm_hidden = ops.cat([norm_encoder, norm_hidden], 1)
        ff_output = self.ff(norm_hidden)
        hidden = ops.add(hidden, ops.mul(gate_ff, ops.narrow(ff_output, 1, ff_output.shape[1] - text)))
        encoder = ops.add(encoder, ops.mul(enc_gate_ff, ops.narrow(ff_output, 1, text)))
        return hidden, encoder


class AdaLayerNorm(Module):
    """LayerNorm shifted and scaled by the conditioning."""

    scope = "norms"

    def __init__(self, conditioning: int, width: int, *, affine: bool) -> None:
        self.linear = Linear(conditioning, 2 * width, bias=True)
        self.norm = LayerNorm(width, affine=affine)

    def forward(self, x: Tensor, temb: Tensor) -> Tensor:
        """[b, s, h] to the same."""
        temb = self.linear(ops.silu(temb))
        shift, scale = ops.chunk(temb, 2, 1)
        shift = ops.unsqueeze(shift, 1)
        scale = ops.unsqueeze(scale, 1)
        return ops.add(ops.mul(self.norm(x), ops.add_scalar(scale)), shift)


class CogVideoXPatchEmbed(Module):
    """Text and squares of latents as one sequence, with a table of positions where they are not rotary."""

    scope = "embedding"

    def __init__(self, c: Config, width: int) -> None:
        channels, self.patch, self.frames = (
            c.integer("in_channels"),
            c.integer("patch_size"),
            c.optional("patch_size_t"),
        )
        self.longest, self.width = c.integer("max_text_seq_length"), width
        self.proj: Module
        if self.frames is None:
            bias = c.flag("patch_bias", True)
            self.proj = Convolution(channels, width, self.patch, self.patch, stride=self.patch, bias=bias)
        else:
            self.proj = Linear(channels * self.patch**2 * self.frames, width, bias=True)
        self.text_proj = Linear(c.integer("text_embed_dim"), width, bias=True)
        frames = (c.integer("sample_frames") - 1) // c.integer("temporal_compression_ratio") + 1
        self.learned = c.flag("use_learned_positional_embeddings")
        self.added = self.learned or not c.flag("use_rotary_positional_embeddings")
        if self.added:
            self.sample = (frames, c.integer("sample_height"), c.integer("sample_width"))
            self.pos_embedding = Buffer(1, self.longest + self._tokens(*self.sample), width, dtype=FP64)

    def _tokens(self, frames: int, height: int, width: int) -> int:
        return frames * (height // self.patch) * (width // self.patch)

    def forward(self, text: Tensor, latents: Tensor) -> Tensor:
        """Text [b, t, text] and latents [b, f, c, h, w] to [b, t + s, width]."""
        text = self.text_proj(text)
        batch, frames, channels, height, width = latents.shape
        if self.frames is None:
            latents = ops.reshape(latents, -1, channels, height, width)
            latents = self.proj(latents)
            latents = ops.view(latents, batch, frames, self.width, -1)
            latents = ops.reshape(ops.transpose(latents, 2, 3), batch, -1, self.width)
        else:
            p, t = self.patch, self.frames
            latents = ops.permute(latents, 0, 1, 3, 4, 2)
            latents = ops.reshape(latents, batch, frames // t, t, height // p, p, width // p, p, channels)
            latents = ops.permute(latents, 0, 1, 3, 5, 7, 2, 4, 6)
            latents = ops.reshape(latents, batch, -1, channels * t * p * p)
            latents = self.proj(latents)
        embeds = ops.cat([text, latents], 1)
        if not self.added:
            return embeds
        if (frames, height, width) == self.sample:
            return ops.add(embeds, ops.to(self.pos_embedding, embeds.dtype))
        if self.learned or text.shape[1] != self.longest:
            raise UsageError(
                "this model's positions are a table for one size and length of text; leave out --height, --width, "
                "--num-frames and --max-sequence-length."
            )
        return ops.add(embeds, ops.to(self._positions(latents, frames), embeds.dtype))

    def _positions(self, like: Tensor, frames: int) -> Tensor:
        """Positions for a size that is not the config's, computed in fp64 (get_3d_sincos_pos_embed)."""
        tape, tokens = like.tape, like.shape[1]
        spatial = tape.empty((tokens // frames, 3 * self.width // 4), FP64)
        pieces = [tape.empty((tokens, 3 * self.width // 4), FP64)]
        del spatial
        pieces.append(tape.empty((tokens, self.width // 4), FP64))
        table = ops.cat(pieces, -1)
        del pieces
        joint = tape.empty((1, self.longest + tokens, self.width), FP64)
        del table
        return joint
