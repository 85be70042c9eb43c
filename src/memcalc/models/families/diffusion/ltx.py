"""LTX-Video: a transformer over latents of 32 pixels and eight frames, whose norms have no weights.

Source: diffusers 0.42.1, models/transformers/transformer_ltx.py.
"""

from __future__ import annotations

from memcalc import ops
from memcalc.autograd.tape import Tape
from memcalc.autograd.tensor import Tensor
from memcalc.common.sizes import Shape
from memcalc.config.reader import Config
from memcalc.errors import ConfigError
from memcalc.models.common.denoiser import Denoiser, Picture, PromptCall, given
from memcalc.models.families.diffusion.pixart import AdaLayerNormSingle
from memcalc.models.family import Family, table
from memcalc.nn.layers.diffusion import CaptionProjection, FeedForward, NoDropout, native_attention
from memcalc.nn.layers.diffusion_norms import BareRMSNorm, RMSNorm
from memcalc.nn.layers.linear import Linear
from memcalc.nn.layers.norms import LayerNorm
from memcalc.nn.module import Module, Parameter
from memcalc.nn.stack import Stack
from memcalc.tables.dtypes import FP32, INT64

Tables = tuple[Tensor, Tensor]


def _rotated(x: Tensor, tables: Tables) -> Tensor:
    """[b, s, h] turned by pairs, in fp32, and cast back."""
    cos, sin = tables
    real, imaginary = ops.unbind(ops.reshape(x, *x.shape[:-1], -1, 2), -1)
    rotated = ops.reshape(ops.stack([ops.neg(imaginary), real], -1), *x.shape)
    out = ops.add(ops.mul(ops.to(x, FP32), cos), ops.mul(ops.to(rotated, FP32), sin))
    return ops.to(out, x.dtype)


class LTXAttention(Module):
    """Attention over the video, or of the video over the text."""

    scope = "attention"

    def __init__(self, width: int, heads: int, text: int | None = None) -> None:
        self.heads = heads
        self.norm_q = RMSNorm(width)
        self.norm_k = RMSNorm(width)
        self.to_q = Linear(width, width, bias=True)
        self.to_k = Linear(text or width, width, bias=True)
        self.to_v = Linear(text or width, width, bias=True)
        self.to_out = [Linear(width, width, bias=True), NoDropout()]

    def _heads(self, x: Tensor) -> Tensor:
        return ops.reshape(x, *x.shape[:2], self.heads, -1)

    def forward(self, hidden: Tensor, encoder: Tensor | None, mask: Tensor | None, tables: Tables | None) -> Tensor:
        """[b, s, h] to the same."""
        if mask is not None:
            mask = mask.tape.empty((mask.shape[0], self.heads, *mask.shape[-2:]), mask.dtype)  # repeat_interleave
        encoder = hidden if encoder is None else encoder
        query, key, value = self.to_q(hidden), self.to_k(encoder), self.to_v(encoder)
        query = self.norm_q(query)
        key = self.norm_k(key)
        if tables is not None:
            query = _rotated(query, tables)
            key = _rotated(key, tables)
        query = self._heads(query)
        key = self._heads(key)
        value = self._heads(value)
        hidden = native_attention(query, key, value, mask)
        hidden = ops.reshape(hidden, *hidden.shape[:2], -1)
        hidden = ops.to(hidden, query.dtype)
        return self.to_out[0](hidden)  # type: ignore[no-any-return]


class LTXVideoTransformerBlock(Module):
    """Self-attention, cross-attention over the text, and an MLP, modulated by a table and the time step."""

    scope = "residual stream"

    def __init__(self, width: int, heads: int, text: int) -> None:
        self.norm1 = BareRMSNorm()
        self.attn1 = LTXAttention(width, heads)
        self.norm2 = BareRMSNorm()
        self.attn2 = LTXAttention(width, heads, text)
        self.ff = FeedForward(width)
        self.scale_shift_table = Parameter(6, width)

    def forward(self, hidden: Tensor, encoder: Tensor, temb: Tensor, tables: Tables, mask: Tensor) -> Tensor:
        """[b, s, h] to the same."""
        norm_hidden = self.norm1(hidden)
        own = ops.unsqueeze(ops.unsqueeze(self.scale_shift_table, 0), 0)
        ada_values = ops.add(own, ops.reshape(temb, *temb.shape[:2], 6, -1))
        shift_msa, scale_msa, gate_msa, shift_mlp, scale_mlp, gate_mlp = ops.unbind(ada_values, 2)
        norm_hidden = ops.add(ops.mul(norm_hidden, ops.add_scalar(scale_msa)), shift_msa)
        attn_hidden = self.attn1(norm_hidden, None, None, tables)
        hidden = ops.add(hidden, ops.mul(attn_hidden, gate_msa))
        attn_hidden = self.attn2(hidden, encoder, mask, None)
        hidden = ops.add(hidden, attn_hidden)
        norm_hidden = ops.add(ops.mul(self.norm2(hidden), ops.add_scalar(scale_mlp)), shift_mlp)
        ff_output = self.ff(norm_hidden)
        return ops.add(hidden, ops.mul(ff_output, gate_mlp))


def _rotary_tables(tape: Tape, batch: int, tokens: int, width: int) -> Tables:
    """Cosines and sines [b, s, width] in fp32 of frames, rows and columns."""
    freqs = tape.empty((batch, tokens, 3 * (width // 6)), FP32)
    doubled = (batch, tokens, 6 * (width // 6))
    cosines, sines = (tape.empty(doubled, FP32) for _ in range(2))
    if width % 6:
        padding = [tape.empty((batch, tokens, width % 6), FP32) for _ in range(2)]
        cosines = ops.cat([padding[0], cosines], -1)
        sines = ops.cat([padding[1], sines], -1)
    del freqs
    return cosines, sines


class LTXVideoTransformer3DModel(Denoiser):
    """The denoiser of LTX-Video."""

    default_side, default_width, default_frames, default_text = 512, 704, 161, 128
    fp32_latents = True
    makes_videos = True
    pixels_per_token = 32

    def __init__(self, c: Config) -> None:
        if c.integer("patch_size") != 1 or c.integer("patch_size_t") != 1 or c.flag("norm_elementwise_affine"):
            raise ConfigError(f"{c.where} has patches or norms of a kind that memcalc does not describe.")
        heads, dim = c.integer("num_attention_heads"), c.integer("attention_head_dim")
        self.width = width = heads * dim
        self.channels, self.prompt_calls = c.integer("in_channels"), _PROMPT_CALLS
        self.text_width, cross = c.integer("caption_channels"), c.integer("cross_attention_dim")
        self.proj_in = Linear(self.channels, width, bias=True)
        self.scale_shift_table = Parameter(2, width)
        self.time_embed = AdaLayerNormSingle(width)
        self.caption_projection = CaptionProjection(self.text_width, width)
        self.transformer_blocks = Stack(
            ["block"] * c.integer("num_layers"), lambda _: LTXVideoTransformerBlock(width, heads, cross), name="block"
        )
        self.norm_out = LayerNorm(width, affine=False)
        self.proj_out = Linear(width, c.optional("out_channels") or self.channels, bias=True)

    def latent_shape(self, picture: Picture) -> Shape:
        """[b, s, channels]: one token for 32 x 32 pixels of eight frames."""
        tokens = ((picture.frames - 1) // 8 + 1) * (picture.height // 32) * (picture.width // 32)
        return (picture.batch, tokens, self.channels)

    def predict(self, latents: Tensor, picture: Picture) -> Tensor:
        """[b, s, channels] to the same."""
        tape, batch = latents.tape, picture.batch
        timestep, encoder = given(tape, batch, dtype=INT64), given(tape, batch, picture.text, self.text_width)
        mask = given(tape, batch, picture.text, dtype=INT64)
        tables = _rotary_tables(tape, batch, latents.shape[1], self.width)
        mask = ops.mul_scalar(ops.add_scalar(ops.to(mask, latents.dtype)))
        mask = ops.unsqueeze(mask, 1)
        hidden = self.proj_in(latents)
        temb, embedded = self.time_embed(timestep, hidden)
        temb = ops.view(temb, batch, -1, temb.shape[-1])
        embedded = ops.view(embedded, batch, -1, embedded.shape[-1])
        encoder = self.caption_projection(encoder)
        encoder = ops.view(encoder, batch, -1, hidden.shape[-1])
        for block in self.transformer_blocks:
            hidden = block(hidden, encoder, temb, tables, mask)
        own = ops.unsqueeze(ops.unsqueeze(self.scale_shift_table, 0), 0)
        values = ops.add(own, ops.unsqueeze(embedded, 2))
        shift, scale = ops.select(values, 2), ops.select(values, 2)
        hidden = self.norm_out(hidden)
        hidden = ops.add(ops.mul(hidden, ops.add_scalar(scale)), shift)
        return self.proj_out(hidden)


_PROMPT_CALLS = {"T5EncoderModel": PromptCall(mask=True)}

DEFAULTS = {
    "in_channels": 128,
    "out_channels": 128,
    "patch_size": 1,
    "patch_size_t": 1,
    "num_attention_heads": 32,
    "attention_head_dim": 64,
    "cross_attention_dim": 2048,
    "num_layers": 28,
    "caption_channels": 4096,
}

FAMILIES = table(
    Family(
        "LTXVideoTransformer3DModel",
        lambda c, _: LTXVideoTransformer3DModel(c),
        DEFAULTS,
        blocks="encoder",
        attention="sdpa",
        supports="training, inference, LoRA",
        verified="runs of diffusers on PyTorch's allocator",
    )
)
