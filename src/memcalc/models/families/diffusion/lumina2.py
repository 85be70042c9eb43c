"""Lumina-Image 2.0: text and picture refined apart, then one sequence of both, with grouped keys and values.

Source: diffusers 0.42.1, models/transformers/transformer_lumina2.py.
"""

from __future__ import annotations

from memcalc import ops
from memcalc.autograd.tape import Tape
from memcalc.autograd.tensor import Tensor
from memcalc.common.sizes import Shape
from memcalc.config.reader import Config
from memcalc.errors import ConfigError
from memcalc.models.common.denoiser import LATENT_SCALE, Denoiser, Picture, PromptCall, given
from memcalc.models.family import Family, table
from memcalc.nn.layers.complex_rotary import complex_rotated
from memcalc.nn.layers.diffusion import NoDropout, TimestepEmbedding, timestep_embedding
from memcalc.nn.layers.diffusion_norms import EagerRMSNorm
from memcalc.nn.layers.linear import Linear
from memcalc.nn.layers.norms import LayerNorm
from memcalc.nn.module import Module
from memcalc.nn.stack import Stack
from memcalc.tables.dtypes import BOOL, COMPLEX128, FP32, INT32, INT64

_CONDITIONING = 1024
"""The most channels of the conditioning."""


class TimestepCaption(Module):
    """The embedded time step, and the captions in the model's width."""

    scope = "embedding"

    def __init__(self, width: int, text: int) -> None:
        self.timestep_embedder = TimestepEmbedding(256, min(width, _CONDITIONING))
        self.caption_embedder = [EagerRMSNorm(text), Linear(text, width, bias=True)]

    def forward(self, timestep: Tensor, encoder: Tensor) -> tuple[Tensor, Tensor]:
        """[b] and [b, t, text] to [b, conditioning] and [b, t, width]."""
        timestep_proj = ops.to(timestep_embedding(timestep, 256), encoder.dtype)
        time_embed = self.timestep_embedder(timestep_proj)
        return time_embed, self.caption_embedder[1](self.caption_embedder[0](encoder))


class GroupedAttention(Module):
    """Self-attention whose keys and values are repeated for all heads."""

    scope = "attention"

    def __init__(self, width: int, heads: int, kv_heads: int) -> None:
        self.heads, self.kv_heads, self.dim = heads, kv_heads, width // heads
        self.norm_q = EagerRMSNorm(self.dim)
        self.norm_k = EagerRMSNorm(self.dim)
        self.to_q = Linear(width, width)
        self.to_k = Linear(width, kv_heads * self.dim)
        self.to_v = Linear(width, kv_heads * self.dim)
        self.to_out = [Linear(width, width), NoDropout()]

    def forward(self, hidden: Tensor, mask: Tensor | None, freqs: Tensor) -> Tensor:
        """[b, s, h] to the same; `mask` [b, s] counts what is no padding."""
        batch, length = hidden.shape[:2]
        query, key, value = self.to_q(hidden), self.to_k(hidden), self.to_v(hidden)
        dtype = query.dtype
        query = ops.view(query, batch, length, self.heads, self.dim)
        key = ops.view(key, batch, length, self.kv_heads, self.dim)
        value = ops.view(value, batch, length, self.kv_heads, self.dim)
        query = self.norm_q(query)
        key = self.norm_k(key)
        query = complex_rotated(query, freqs)
        key = complex_rotated(key, freqs)
        query, key = ops.to(query, dtype), ops.to(key, dtype)
        key = self._repeated(key)
        value = self._repeated(value)
        if mask is not None:
            mask = ops.view(ops.to(mask, BOOL), batch, 1, 1, length)
        query, key, value = ops.transpose(query, 1, 2), ops.transpose(key, 1, 2), ops.transpose(value, 1, 2)
        hidden = ops.scaled_dot_product_attention(query, key, value, mask)
        hidden = ops.reshape(ops.transpose(hidden, 1, 2), batch, length, -1)
        hidden = ops.to(hidden, query.dtype)
        return self.to_out[0](hidden)  # type: ignore[no-any-return]

    def _repeated(self, x: Tensor) -> Tensor:
        times = self.heads // self.kv_heads
        return ops.reshape(ops.repeat(ops.unsqueeze(x, 3), 1, 1, 1, times, 1), *x.shape[:2], self.heads, self.dim)


class LuminaFeedForward(Module):
    """A gated MLP whose SiLU works in fp32."""

    scope = "MLP"

    def __init__(self, width: int, inner: int) -> None:
        self.linear_1 = Linear(width, inner)
        self.linear_2 = Linear(inner, width)
        self.linear_3 = Linear(width, inner)

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] to the same."""
        return self.linear_2(ops.mul(_fp32_silu(self.linear_1(x)), self.linear_3(x)))


def _fp32_silu(x: Tensor) -> Tensor:
    return ops.to(ops.silu(ops.to(x, FP32)), x.dtype)


class LuminaRMSNormZero(Module):
    """A norm scaled by the conditioning, which gives two gates and another scale too."""

    scope = "norms"

    def __init__(self, width: int) -> None:
        self.linear = Linear(min(width, _CONDITIONING), 4 * width, bias=True)
        self.norm = EagerRMSNorm(width)

    def forward(self, x: Tensor, emb: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """x [b, s, h] modulated, and three chunks [b, h]."""
        emb = self.linear(ops.silu(emb))
        scale_msa, gate_msa, scale_mlp, gate_mlp = ops.chunk(emb, 4, 1)
        x = ops.mul(self.norm(x), ops.add_scalar(ops.unsqueeze(scale_msa, 1)))
        return x, gate_msa, scale_mlp, gate_mlp


class Lumina2TransformerBlock(Module):
    """Attention and MLP, each between two norms; `modulated` scales and gates them by the conditioning."""

    scope = "residual stream"

    def __init__(self, width: int, heads: int, kv_heads: int, inner: int, *, modulated: bool = True) -> None:
        self.attn = GroupedAttention(width, heads, kv_heads)
        self.feed_forward = LuminaFeedForward(width, inner)
        self.norm1: Module = LuminaRMSNormZero(width) if modulated else EagerRMSNorm(width)
        self.ffn_norm1 = EagerRMSNorm(width)
        self.norm2 = EagerRMSNorm(width)
        self.ffn_norm2 = EagerRMSNorm(width)
        self.modulated = modulated

    def forward(self, hidden: Tensor, mask: Tensor | None, freqs: Tensor, temb: Tensor | None = None) -> Tensor:
        """[b, s, h] to the same."""
        if not self.modulated:
            norm_hidden = self.norm1(hidden)
            attn_output = self.attn(norm_hidden, mask, freqs)
            hidden = ops.add(hidden, self.norm2(attn_output))
            mlp_output = self.feed_forward(self.ffn_norm1(hidden))
            return ops.add(hidden, self.ffn_norm2(mlp_output))
        norm_hidden, gate_msa, scale_mlp, gate_mlp = self.norm1(hidden, temb)
        attn_output = self.attn(norm_hidden, mask, freqs)
        hidden = ops.add(hidden, ops.mul(ops.tanh(ops.unsqueeze(gate_msa, 1)), self.norm2(attn_output)))
        norm_hidden_mlp = ops.mul(self.ffn_norm1(hidden), ops.add_scalar(ops.unsqueeze(scale_mlp, 1)))
        mlp_output = self.feed_forward(norm_hidden_mlp)
        del norm_hidden_mlp
        return ops.add(hidden, ops.mul(ops.tanh(ops.unsqueeze(gate_mlp, 1)), self.ffn_norm2(mlp_output)))


class LuminaLayerNormContinuous(Module):
    """LayerNorm scaled by the conditioning, and a projection."""

    scope = "head"

    def __init__(self, width: int, outputs: int) -> None:
        self.linear_1 = Linear(min(width, _CONDITIONING), width, bias=True)
        self.norm = LayerNorm(width, affine=False)
        self.linear_2 = Linear(width, outputs, bias=True)

    def forward(self, x: Tensor, conditioning: Tensor) -> Tensor:
        """[b, s, h] to [b, s, outputs]."""
        emb = self.linear_1(ops.to(ops.silu(conditioning), x.dtype))
        x = ops.mul(self.norm(x), ops.unsqueeze(ops.add_scalar(emb), 1))
        return self.linear_2(x)


class Lumina2Transformer2DModel(Denoiser):
    """The denoiser of Lumina-Image 2.0."""

    longest_text = 512
    default_text = 256
    guidance_in = "two"

    def __init__(self, c: Config) -> None:
        if c.integer("patch_size") != 2:
            raise ConfigError(f"{c.where} has patches of another size than 2, which memcalc does not describe.")
        self.default_side, self.prompt_calls = LATENT_SCALE * c.integer("sample_size"), _PROMPT_CALLS
        width, heads = c.integer("hidden_size"), c.integer("num_attention_heads")
        kv_heads, multiple = c.optional("num_kv_heads") or heads, c.integer("multiple_of")
        inner = int((c.number("ffn_dim_multiplier") if c.get("ffn_dim_multiplier") else 1) * 4 * width)
        inner = -(-inner // multiple) * multiple
        self.channels, self.text_width = c.integer("in_channels"), c.integer("cap_feat_dim")
        self.out_channels = c.optional("out_channels") or self.channels
        self.axes, self.lengths = c.integers("axes_dim_rope"), c.integers("axes_lens")

        def block(*, modulated: bool = True) -> Module:
            return Lumina2TransformerBlock(width, heads, kv_heads, inner, modulated=modulated)

        refiners = range(c.integer("num_refiner_layers"))
        self.x_embedder = Linear(4 * self.channels, width, bias=True)
        self.time_caption_embed = TimestepCaption(width, self.text_width)
        self.noise_refiner = [block() for _ in refiners]
        self.context_refiner = [block(modulated=False) for _ in refiners]
        self.layers = Stack(["block"] * c.integer("num_layers"), lambda _: block(), name="block")
        self.norm_out = LuminaLayerNormContinuous(width, 4 * self.out_channels)

    def latent_shape(self, picture: Picture) -> Shape:
        """[b, channels, h, w]."""
        return (picture.batch, self.channels, picture.latent_height, picture.latent_width)

    def predict(self, latents: Tensor, picture: Picture) -> Tensor:
        """[b, channels, h, w] to [b, out channels, h, w]."""
        tape, batch, text = latents.tape, picture.batch, picture.text
        timestep, encoder = given(tape, batch), given(tape, batch, text, self.text_width)
        encoder_mask = given(tape, batch, text, dtype=INT64)
        temb, encoder = self.time_caption_embed(timestep, encoder)
        hidden, context_freqs, noise_freqs, freqs = self._patches(latents, text)
        hidden = self.x_embedder(hidden)
        for layer in self.context_refiner:
            encoder = layer(encoder, encoder_mask, context_freqs)
        for layer in self.noise_refiner:
            hidden = layer(hidden, None, noise_freqs, temb)
        length = text + hidden.shape[1]
        mask = tape.empty((batch, length), BOOL)
        joint = tape.empty((batch, length, hidden.shape[2]), hidden.dtype)
        for _ in range(batch):
            joint = ops.copy_slice_(joint, ops.narrow(ops.select(encoder, 0), 0, text))
            joint = ops.copy_slice_(joint, ops.select(hidden, 0))
        hidden = joint
        for joint_layer in self.layers:
            hidden = joint_layer(hidden, None, freqs, temb)
        hidden = self.norm_out(hidden, temb)
        rows, columns = picture.latent_height // 2, picture.latent_width // 2
        made = [self._pixels(ops.select(hidden, 0), rows, columns) for _ in range(batch)]
        out = ops.stack(made, 0)
        del mask, joint  # they stay to the end
        return out

    def _patches(self, latents: Tensor, text: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Squares of two latents [b, s, 4 c], and rotary positions of text, picture and both."""
        tape, (batch, channels, height, width) = latents.tape, latents.shape
        rows, columns = height // 2, width // 2
        tokens = rows * columns
        ids = tape.empty((batch, text + tokens, 3), INT32)
        row_ids, column_ids = tape.empty((tokens,), INT32), tape.empty((tokens,), INT32)
        freqs = self._freqs(tape, batch, text + tokens)
        context_freqs = tape.empty((batch, text, freqs.shape[-1]), COMPLEX128)
        noise_freqs = tape.empty((batch, tokens, freqs.shape[-1]), COMPLEX128)
        hidden = ops.permute(ops.view(latents, batch, channels, rows, 2, columns, 2), 0, 2, 4, 3, 5, 1)
        hidden = ops.reshape(hidden, batch, tokens, 4 * channels)
        del ids, row_ids, column_ids
        return hidden, context_freqs, noise_freqs, freqs

    def _freqs(self, tape: Tape, batch: int, length: int) -> Tensor:
        """Complex numbers [b, s, d / 2] of all positions, gathered from tables that are on the CPU."""
        result = []
        for axis, longest in zip(self.axes, self.lengths, strict=True):
            frequencies = tape.empty((longest, axis // 2), COMPLEX128)
            repeated = tape.empty((batch, length, axis // 2), INT32)
            indices = tape.empty((batch, length, axis // 2), INT64)
            del repeated
            every = tape.empty((batch, longest, axis // 2), COMPLEX128)
            result.append(tape.empty((batch, length, axis // 2), COMPLEX128))
            del every
        out = ops.cat(result, -1)
        del frequencies, indices
        return out

    def _pixels(self, hidden: Tensor, rows: int, columns: int) -> Tensor:
        """Tokens [s, 4 c], of which the picture's come last, to [c, h, w]: a copy in the order of pixels."""
        hidden = ops.view(ops.narrow(hidden, 0, rows * columns), rows, columns, 2, 2, self.out_channels)
        return ops.reshape(ops.permute(hidden, 4, 0, 2, 1, 3), self.out_channels, 2 * rows, 2 * columns)


_PROMPT_CALLS = {"Gemma2Model": PromptCall(hidden=(-2,), mask=True)}

DEFAULTS: dict[str, object] = {
    "sample_size": 128,
    "patch_size": 2,
    "in_channels": 16,
    "out_channels": None,
    "hidden_size": 2304,
    "num_layers": 26,
    "num_refiner_layers": 2,
    "num_attention_heads": 24,
    "num_kv_heads": 8,
    "multiple_of": 256,
    "ffn_dim_multiplier": None,
    "axes_dim_rope": [32, 32, 32],
    "axes_lens": [300, 512, 512],
    "cap_feat_dim": 1024,
}

FAMILIES = table(
    Family(
        "Lumina2Transformer2DModel",
        lambda c, _: Lumina2Transformer2DModel(c),
        DEFAULTS,
        blocks="encoder",
        attention="sdpa",
        supports="training, inference, LoRA",
        verified="runs of diffusers on PyTorch's allocator",
    )
)
