"""Qwen-Image: blocks with a stream for text and one for the picture, rotary positions as complex numbers.

Source: diffusers 0.42.1, models/transformers/transformer_qwenimage.py.
"""

from __future__ import annotations

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.common.sizes import Shape
from memcalc.config.reader import Config
from memcalc.errors import ConfigError
from memcalc.models.common.denoiser import Denoiser, Picture, PromptCall, given
from memcalc.models.family import Family, table
from memcalc.nn.layers.complex_rotary import complex_rotated
from memcalc.nn.layers.diffusion import FeedForward, NoDropout, TimestepEmbedding, native_attention, timestep_embedding
from memcalc.nn.layers.diffusion_norms import AdaLayerNormContinuous, EagerRMSNorm
from memcalc.nn.layers.linear import Linear
from memcalc.nn.layers.norms import LayerNorm
from memcalc.nn.module import Module
from memcalc.nn.stack import Stack
from memcalc.tables.dtypes import COMPLEX64, FP16, INT32


class QwenAttention(Module):
    """Attention over text and picture together."""

    scope = "attention"

    def __init__(self, width: int, heads: int) -> None:
        self.heads, self.dim = heads, width // heads
        self.norm_q = EagerRMSNorm(self.dim)
        self.norm_k = EagerRMSNorm(self.dim)
        self.to_q = Linear(width, width, bias=True)
        self.to_k = Linear(width, width, bias=True)
        self.to_v = Linear(width, width, bias=True)
        self.add_k_proj = Linear(width, width, bias=True)
        self.add_v_proj = Linear(width, width, bias=True)
        self.add_q_proj = Linear(width, width, bias=True)
        self.to_out = [Linear(width, width, bias=True), NoDropout()]
        self.to_add_out = Linear(width, width, bias=True)
        self.norm_added_q = EagerRMSNorm(self.dim)
        self.norm_added_k = EagerRMSNorm(self.dim)

    def _heads(self, x: Tensor) -> Tensor:
        return ops.view(x, *x.shape[:2], self.heads, self.dim)

    def forward(self, hidden: Tensor, encoder: Tensor, freqs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Picture [b, s, h] and text [b, t, h] to the same."""
        text = encoder.shape[1]
        img_query, img_key, img_value = self.to_q(hidden), self.to_k(hidden), self.to_v(hidden)
        txt_query, txt_key, txt_value = self.add_q_proj(encoder), self.add_k_proj(encoder), self.add_v_proj(encoder)
        img_query = self._heads(img_query)
        img_key = self._heads(img_key)
        img_value = self._heads(img_value)
        txt_query = self._heads(txt_query)
        txt_key = self._heads(txt_key)
        txt_value = self._heads(txt_value)
        img_query = self.norm_q(img_query)
        img_key = self.norm_k(img_key)
        txt_query = self.norm_added_q(txt_query)
        txt_key = self.norm_added_k(txt_key)
        img_freqs, txt_freqs = freqs
        img_query = complex_rotated(img_query, img_freqs)
        img_key = complex_rotated(img_key, img_freqs)
        txt_query = complex_rotated(txt_query, txt_freqs)
        txt_key = complex_rotated(txt_key, txt_freqs)
        joint_query = ops.cat([txt_query, img_query], 1)
        joint_key = ops.cat([txt_key, img_key], 1)
        joint_value = ops.cat([txt_value, img_value], 1)
        joint = native_attention(joint_query, joint_key, joint_value)
        joint = ops.reshape(joint, *joint.shape[:2], -1)
        joint = ops.to(joint, joint_query.dtype)
        txt_attn_output = ops.narrow(joint, 1, text)
        img_attn_output = ops.narrow(joint, 1, joint.shape[1] - text)
        img_attn_output = self.to_out[0](ops.contiguous(img_attn_output))
        txt_attn_output = self.to_add_out(ops.contiguous(txt_attn_output))
        return img_attn_output, txt_attn_output


def _modulated(x: Tensor, parameters: Tensor, index: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """x scaled and shifted, and the gate: by the second half of the parameters where `index` [b, s] says so."""
    shift, scale, gate = ops.chunk(parameters, 3, -1)
    if index is None:
        shift_result, scale_result, gate_result = (ops.unsqueeze(part, 1) for part in (shift, scale, gate))
    else:
        shift_result, scale_result, gate_result = (_chosen(part, index) for part in (shift, scale, gate))
    return ops.add(ops.mul(x, ops.add_scalar(scale_result)), shift_result), gate_result


def _chosen(part: Tensor, index: Tensor) -> Tensor:
    """[2 b, h] by tokens: [b, s, h], from either half."""
    batch = part.shape[0] // 2
    first, second = (ops.unsqueeze(ops.narrow(part, 0, batch), 1) for _ in range(2))
    return ops.where(ops.compare(ops.unsqueeze(index, -1)), first, second)


class QwenImageTransformerBlock(Module):
    """Two streams with one attention; all of its locals stay to its end."""

    scope = "residual stream"

    def __init__(self, width: int, heads: int) -> None:
        self.img_mod = [NoDropout(), Linear(width, 6 * width, bias=True)]
        self.img_norm1 = LayerNorm(width, affine=False)
        self.attn = QwenAttention(width, heads)
        self.img_norm2 = LayerNorm(width, affine=False)
        self.img_mlp = FeedForward(width)
        self.txt_mod = [NoDropout(), Linear(width, 6 * width, bias=True)]
        self.txt_norm1 = LayerNorm(width, affine=False)
        self.txt_norm2 = LayerNorm(width, affine=False)
        self.txt_mlp = FeedForward(width)

    def forward(
        self, hidden: Tensor, encoder: Tensor, temb: Tensor, freqs: tuple[Tensor, Tensor], index: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Picture [b, s, h] and text [b, t, h]: text and picture. `index`: tokens that the second time step is for."""
        img_mod1, img_mod2 = ops.chunk(self.img_mod[1](ops.silu(temb)), 2, -1)
        if index is not None:
            temb = ops.narrow(temb, 0, temb.shape[0] // 2)
        txt_mod1, txt_mod2 = ops.chunk(self.txt_mod[1](ops.silu(temb)), 2, -1)
        img_normed = self.img_norm1(hidden)
        img_modulated, img_gate1 = _modulated(img_normed, img_mod1, index)
        txt_normed = self.txt_norm1(encoder)
        txt_modulated, txt_gate1 = _modulated(txt_normed, txt_mod1)
        attn_output = self.attn(img_modulated, txt_modulated, freqs)
        img_attn_output, txt_attn_output = attn_output
        hidden = ops.add(hidden, ops.mul(img_gate1, img_attn_output))
        encoder = ops.add(encoder, ops.mul(txt_gate1, txt_attn_output))
        img_normed2 = self.img_norm2(hidden)
        img_modulated2, img_gate2 = _modulated(img_normed2, img_mod2, index)
        img_mlp_output = self.img_mlp(img_modulated2)
        hidden = ops.add(hidden, ops.mul(img_gate2, img_mlp_output))
        txt_normed2 = self.txt_norm2(encoder)
        txt_modulated2, txt_gate2 = _modulated(txt_normed2, txt_mod2)
        txt_mlp_output = self.txt_mlp(txt_modulated2)
        encoder = ops.add(encoder, ops.mul(txt_gate2, txt_mlp_output))
        if encoder.dtype is FP16:
            encoder = ops.clamp(encoder)
        if hidden.dtype is FP16:
            hidden = ops.clamp(hidden)
        return encoder, hidden


class TimestepEmbeddings(Module):
    """The time step alone."""

    scope = "embedding"

    def __init__(self, width: int) -> None:
        self.timestep_embedder = TimestepEmbedding(256, width)

    def forward(self, timestep: Tensor, hidden: Tensor) -> Tensor:
        """[b] to [b, width]."""
        timesteps_proj = timestep_embedding(timestep, 256)
        return self.timestep_embedder(ops.to(timesteps_proj, hidden.dtype))


class QwenImageTransformer2DModel(Denoiser):
    """The denoiser of Qwen-Image."""

    longest_text = 1024
    default_side, default_text = 1328, 512
    guidance_in = "two"
    takes_images = True

    def __init__(self, c: Config) -> None:
        for key in ("use_additional_t_cond", "use_layer3d_rope"):
            if c.flag(key):
                raise ConfigError(f"{c.where} has '{key}', which memcalc does not describe.")
        heads, self.dim = c.integer("num_attention_heads"), c.integer("attention_head_dim")
        width, self.channels = heads * self.dim, c.integer("in_channels")
        self.text_width, self.prompt_calls = c.integer("joint_attention_dim"), _PROMPT_CALLS
        outputs = c.integer("patch_size") ** 2 * (c.optional("out_channels") or self.channels)
        self.zero_cond_t = c.flag("zero_cond_t")
        self.time_text_embed = TimestepEmbeddings(width)
        self.txt_norm = EagerRMSNorm(self.text_width)
        self.img_in = Linear(self.channels, width, bias=True)
        self.txt_in = Linear(self.text_width, width, bias=True)
        self.transformer_blocks = Stack(
            ["block"] * c.integer("num_layers"), lambda _: QwenImageTransformerBlock(width, heads), name="block"
        )
        self.norm_out = AdaLayerNormContinuous(width, width)
        self.proj_out = Linear(width, outputs, bias=True)

    def latent_shape(self, picture: Picture) -> Shape:
        """Squares of two by two latents are packed into channels."""
        return (picture.batch, (picture.latent_height // 2) * (picture.latent_width // 2), self.channels)

    def predict(self, latents: Tensor, picture: Picture) -> Tensor:
        """Packed latents [b, s, c] to the same."""
        tape, batch, text = latents.tape, picture.batch, picture.text
        timestep, encoder = given(tape, batch), given(tape, batch, text, self.text_width)
        tables = [given(tape, _LONGEST, self.dim // 2, dtype=COMPLEX64, name="rotary tables") for _ in range(2)]
        images = 1 + picture.images
        cached = [
            given(tape, latents.shape[1] // images, self.dim // 2, dtype=COMPLEX64, name="rotary tables")
            for _ in range(images)
        ]
        hidden = self.img_in(latents)
        timestep = ops.to(timestep, hidden.dtype)
        index = None
        if self.zero_cond_t:
            timestep = ops.cat([timestep, ops.mul_scalar(timestep)], 0)
            index = tape.empty((batch, latents.shape[1]), INT32)
        encoder = self.txt_norm(encoder)
        encoder = self.txt_in(encoder)
        temb = self.time_text_embed(timestep, hidden)
        freqs = ops.cat(cached, 0), ops.narrow(tables[0], 0, text)
        for block in self.transformer_blocks:
            encoder, hidden = block(hidden, encoder, temb, freqs, index)
        if index is not None:
            temb = ops.narrow(temb, 0, batch)
        hidden = self.norm_out(hidden, temb)
        return self.proj_out(hidden)


_LONGEST = 4096
"""Positions of the tables, which outlive a step in a cache."""

_TEMPLATE = 34
"""Tokens of the chat template, whose states are dropped."""

_PROMPT_CALLS = {"Qwen2_5_VLForConditionalGeneration": PromptCall(hidden=(-1,), mask=True, fewer=-_TEMPLATE)}

DEFAULTS = {
    "patch_size": 2,
    "in_channels": 64,
    "out_channels": 16,
    "num_layers": 60,
    "attention_head_dim": 128,
    "num_attention_heads": 24,
    "joint_attention_dim": 3584,
}

FAMILIES = table(
    Family(
        "QwenImageTransformer2DModel",
        lambda c, _: QwenImageTransformer2DModel(c),
        DEFAULTS,
        blocks="encoder",
        attention="sdpa",
        supports="training, inference, LoRA",
        verified="runs of diffusers on PyTorch's allocator",
    )
)
