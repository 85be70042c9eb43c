"""CogVideoX 1.0 and 1.5: text and video in one sequence, normalized and gated apart; rotary or added positions.

Source: diffusers 0.42.1, models/transformers/cogvideox_transformer_3d.py, models/embeddings.py (CogVideoXPatchEmbed).
"""

from __future__ import annotations

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.common.sizes import Shape
from memcalc.config.reader import Config
from memcalc.errors import ConfigError
from memcalc.models.common.denoiser import LATENT_SCALE, Denoiser, Picture, PromptCall, given
from memcalc.models.families.diffusion.cogvideox_blocks import AdaLayerNorm, CogVideoXBlock, CogVideoXPatchEmbed
from memcalc.models.family import Family, table
from memcalc.nn.layers.diffusion import TimestepEmbedding, timestep_embedding
from memcalc.nn.layers.linear import Linear
from memcalc.nn.layers.norms import LayerNorm
from memcalc.nn.stack import Stack
from memcalc.tables.dtypes import FP32, INT64


class CogVideoXTransformer3DModel(Denoiser):
    """The denoiser of CogVideoX, text to video."""

    makes_videos = True

    def __init__(self, c: Config) -> None:
        heads, dim = c.integer("num_attention_heads"), c.integer("attention_head_dim")
        width, conditioning = heads * dim, c.integer("time_embed_dim")
        self.width, self.dim, self.channels = width, dim, c.integer("in_channels")
        self.out_channels = c.optional("out_channels") or self.channels
        if self.channels != self.out_channels or c.optional("ofs_embed_dim") is not None:
            raise ConfigError(
                f"{c.where} makes videos of pictures (its 'in_channels' are not its 'out_channels', or it has "
                "'ofs_embed_dim'), which memcalc does not describe; the text-to-video model is known."
            )
        self.patch, self.frames = c.integer("patch_size"), c.optional("patch_size_t")
        self.text_width, self.default_text = c.integer("text_embed_dim"), c.integer("max_text_seq_length")
        self.default_side, self.default_width = (
            LATENT_SCALE * c.integer(f"sample_{side}") for side in ("height", "width")
        )
        self.default_frames = c.integer("sample_frames")
        self.rotary, affine = c.flag("use_rotary_positional_embeddings"), c.flag("norm_elementwise_affine", True)
        self.patch_embed = CogVideoXPatchEmbed(c, width)
        self.time_embedding = TimestepEmbedding(width, conditioning)
        self.transformer_blocks = Stack(
            ["block"] * c.integer("num_layers"), lambda _: CogVideoXBlock(c, width, heads), name="block"
        )
        self.norm_final = LayerNorm(width, affine=affine)
        self.norm_out = AdaLayerNorm(conditioning, width, affine=affine)
        self.proj_out = Linear(width, self.patch**2 * (self.frames or 1) * self.out_channels, bias=True)
        self.prompt_calls = {"T5EncoderModel": PromptCall()}

    def latent_shape(self, picture: Picture) -> Shape:
        """[b, frames, channels, h, w]; frames are a multiple of a patch's."""
        of_patch = self.frames or 1
        frames = -(-picture.latent_frames // of_patch) * of_patch
        return (picture.batch, frames, self.channels, picture.latent_height, picture.latent_width)

    def predict(self, latents: Tensor, picture: Picture) -> Tensor:
        """[b, frames, channels, h, w] to the same."""
        tape, batch = latents.tape, picture.batch
        _, frames, _, height, width = latents.shape
        p, t = self.patch, self.frames or 1
        timestep, encoder = given(tape, batch, dtype=INT64), given(tape, batch, picture.text, self.text_width)
        tokens = (frames // t) * (height // p) * (width // p)
        tables = None
        if self.rotary:
            tables = given(tape, tokens, self.dim, dtype=FP32), given(tape, tokens, self.dim, dtype=FP32)
        t_emb = timestep_embedding(timestep, self.width)
        t_emb = ops.to(t_emb, latents.dtype)
        emb = self.time_embedding(t_emb)
        hidden = self.patch_embed(encoder, latents)
        encoder = ops.narrow(hidden, 1, picture.text)
        hidden = ops.narrow(hidden, 1, tokens)
        for block in self.transformer_blocks:
            hidden, encoder = block(hidden, encoder, emb, tables)
        hidden = self.norm_final(hidden)
        hidden = self.norm_out(hidden, emb)
        hidden = self.proj_out(hidden)
        hidden = ops.reshape(hidden, batch, frames // t, height // p, width // p, -1, t, p, p)
        output = ops.permute(hidden, 0, 1, 5, 4, 2, 6, 3, 7)
        return ops.reshape(output, batch, frames, -1, height, width)


DEFAULTS: dict[str, object] = {
    "num_attention_heads": 30,
    "attention_head_dim": 64,
    "in_channels": 16,
    "out_channels": 16,
    "time_embed_dim": 512,
    "ofs_embed_dim": None,
    "text_embed_dim": 4096,
    "num_layers": 30,
    "attention_bias": True,
    "sample_width": 90,
    "sample_height": 60,
    "sample_frames": 49,
    "patch_size": 2,
    "patch_size_t": None,
    "temporal_compression_ratio": 4,
    "max_text_seq_length": 226,
    "norm_elementwise_affine": True,
    "use_rotary_positional_embeddings": False,
    "use_learned_positional_embeddings": False,
    "patch_bias": True,
}

FAMILIES = table(
    Family(
        "CogVideoXTransformer3DModel",
        lambda c, _: CogVideoXTransformer3DModel(c),
        DEFAULTS,
        blocks="encoder",
        attention="sdpa",
        supports="training, inference, LoRA",
        verified="runs of diffusers on PyTorch's allocator",
    )
)
