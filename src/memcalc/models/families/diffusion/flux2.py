"""FLUX.2: FLUX.1's streams with modulations that all blocks share, gated MLPs, and no biases.

Source: diffusers 0.42.1, models/transformers/transformer_flux2.py.
"""

from __future__ import annotations

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.common.sizes import Shape
from memcalc.config.reader import Config
from memcalc.models.common.denoiser import Denoiser, Picture, PromptCall, given
from memcalc.models.families.diffusion.flux2_blocks import (
    Flux2SingleTransformerBlock,
    Flux2TransformerBlock,
    Modulation,
    TimestepGuidanceEmbeddings,
)
from memcalc.models.family import Family, table
from memcalc.nn.layers.diffusion import rotary_tables
from memcalc.nn.layers.diffusion_norms import AdaLayerNormContinuous
from memcalc.nn.layers.linear import Linear
from memcalc.nn.stack import Stack
from memcalc.tables.dtypes import FP32

_PROMPT_CALLS = {
    "Mistral3ForConditionalGeneration": PromptCall(hidden=(10, 20, 30), mask=True, cache=False),
    "Qwen3ForCausalLM": PromptCall(hidden=(9, 18, 27), mask=True, cache=False),
}


class Flux2Transformer2DModel(Denoiser):
    """The denoiser of FLUX.2."""

    default_text = 512
    takes_images = True
    prompt_calls = _PROMPT_CALLS

    def __init__(self, c: Config) -> None:
        heads, dim = c.integer("num_attention_heads"), c.integer("attention_head_dim")
        width, self.channels = heads * dim, c.integer("in_channels")
        inner = int(width * c.number("mlp_ratio"))
        self.axes, self.text_width = c.integers("axes_dims_rope"), c.integer("joint_attention_dim")
        self.guidance = c.flag("guidance_embeds", True)
        self.guidance_in = "none" if self.guidance else "two"
        self.time_guidance_embed = TimestepGuidanceEmbeddings(
            c.integer("timestep_guidance_channels"), width, guidance=self.guidance
        )
        self.double_stream_modulation_img = Modulation(width, 2)
        self.double_stream_modulation_txt = Modulation(width, 2)
        self.single_stream_modulation = Modulation(width, 1)
        self.x_embedder = Linear(self.channels, width)
        self.context_embedder = Linear(self.text_width, width)
        self.transformer_blocks = Stack(
            ["double"] * c.integer("num_layers"),
            lambda _: Flux2TransformerBlock(width, heads, dim, inner),
            name="block",
        )
        self.single_transformer_blocks = Stack(
            ["single"] * c.integer("num_single_layers"),
            lambda _: Flux2SingleTransformerBlock(width, heads, dim, inner),
            name="single block",
        )
        self.norm_out = AdaLayerNormContinuous(width, width, bias=False)
        self.proj_out = Linear(width, c.optional("out_channels") or self.channels)

    def latent_shape(self, picture: Picture) -> Shape:
        """Squares of two by two latents are packed into channels."""
        return (picture.batch, (picture.latent_height // 2) * (picture.latent_width // 2), self.channels)

    def predict(self, latents: Tensor, picture: Picture) -> Tensor:
        """Packed latents [b, s, c] to the same."""
        tape, batch, text = latents.tape, picture.batch, picture.text
        timestep, encoder = given(tape, batch), given(tape, batch, text, self.text_width)
        img_ids = given(tape, batch, latents.shape[1], 4)
        txt_ids = given(tape, batch, text, 4)
        guidance = given(tape, batch, dtype=FP32) if self.guidance else None
        timestep = ops.mul_scalar(ops.to(timestep, latents.dtype))
        if guidance is not None:
            guidance = ops.mul_scalar(ops.to(guidance, latents.dtype))
        temb = self.time_guidance_embed(timestep, guidance)
        double_stream_mod_img = self.double_stream_modulation_img(temb)
        double_stream_mod_txt = self.double_stream_modulation_txt(temb)
        single_stream_mod = self.single_stream_modulation(temb)
        hidden = self.x_embedder(latents)
        encoder = self.context_embedder(encoder)
        img_ids, txt_ids = ops.select(img_ids, 0), ops.select(txt_ids, 0)
        image_tables, text_tables = rotary_tables(img_ids, self.axes), rotary_tables(txt_ids, self.axes)
        tables = (ops.cat([text_tables[0], image_tables[0]], 0), ops.cat([text_tables[1], image_tables[1]], 0))
        for block in self.transformer_blocks:
            encoder, hidden = block(hidden, encoder, double_stream_mod_img, double_stream_mod_txt, tables)
        hidden = ops.cat([encoder, hidden], 1)
        for block in self.single_transformer_blocks:
            hidden = block(hidden, single_stream_mod, tables)
        hidden = ops.narrow(hidden, 1, hidden.shape[1] - text)
        hidden = self.norm_out(hidden, temb)
        output: Tensor = self.proj_out(hidden)
        return output


DEFAULTS = {
    "patch_size": 1,
    "in_channels": 128,
    "out_channels": None,
    "num_layers": 8,
    "num_single_layers": 48,
    "attention_head_dim": 128,
    "num_attention_heads": 48,
    "joint_attention_dim": 15360,
    "timestep_guidance_channels": 256,
    "mlp_ratio": 3.0,
    "axes_dims_rope": [32, 32, 32, 32],
    "guidance_embeds": True,
}

FAMILIES = table(
    Family(
        "Flux2Transformer2DModel",
        lambda c, _: Flux2Transformer2DModel(c),
        DEFAULTS,
        blocks="encoder",
        attention="sdpa",
        supports="training, inference, LoRA",
        verified="runs of diffusers on PyTorch's allocator",
    )
)
