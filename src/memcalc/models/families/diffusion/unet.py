"""UNet2DConditionModel: Stable Diffusion 1.5 and 2.1, SDXL, Kolors.

Source: diffusers 0.42.1, models/unets/{unet_2d_condition,unet_2d_blocks}.py, resnet.py, transformers/transformer_2d.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import NamedTuple

from memcalc import ops
from memcalc.autograd.tape import Tape
from memcalc.autograd.tensor import Tensor
from memcalc.common.sizes import Shape
from memcalc.config.reader import Config
from memcalc.errors import ConfigError, UsageError
from memcalc.models.common.denoiser import CLIP, CLIP_HIDDEN, LATENT_SCALE, Denoiser, Picture, given
from memcalc.models.family import Family, table
from memcalc.nn.layers.diffusion import Convolution, TimestepEmbedding, timestep_embedding
from memcalc.nn.layers.diffusion_blocks import GroupNorm, Resample, ResnetBlock2D, SpatialTransformer, run_checkpointed
from memcalc.nn.layers.linear import Linear
from memcalc.nn.module import Module
from memcalc.tables.dtypes import INT64


class DownBlock(Module):
    """Resnets, each with a transformer behind it where the level has attention, and a downsampler."""

    scope = "down blocks"

    def __init__(self, resnets: list[Module], attentions: list[Module], downsample: int) -> None:
        if attentions:
            self.attentions = attentions
        self.resnets = resnets
        if downsample:
            self.downsamplers = [Resample(downsample, down=True)]
        self.attends, self.downsamples = bool(attentions), bool(downsample)

    def forward(self, hidden: Tensor, temb: Tensor, encoder: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The states of the level below, and those that skip to the way up."""
        output_states: tuple[Tensor, ...] = ()
        for index, resnet in enumerate(self.resnets):
            hidden = run_checkpointed(resnet, hidden, temb)
            if self.attends:
                hidden = self.attentions[index](hidden, encoder)
            output_states = (*output_states, hidden)
        if self.downsamples:
            hidden = self.downsamplers[0](hidden)
            output_states = (*output_states, hidden)
        return hidden, output_states


class MidBlock(Module):
    """A resnet, a transformer, and a resnet."""

    scope = "mid block"

    def __init__(self, resnets: list[Module], attentions: list[Module]) -> None:
        self.attentions = attentions
        self.resnets = resnets

    def forward(self, hidden: Tensor, temb: Tensor, encoder: Tensor) -> Tensor:
        """[b, c, h, w] to the same."""
        hidden = self.resnets[0](hidden, temb)
        for attention, resnet in zip(self.attentions, self.resnets[1:], strict=True):
            hidden = attention(hidden, encoder)
            hidden = run_checkpointed(resnet, hidden, temb)
        return hidden


class UpBlock(Module):
    """Resnets over the states and what skipped to them, each with a transformer behind it, and an upsampler."""

    scope = "up blocks"

    def __init__(self, resnets: list[Module], attentions: list[Module], upsample: int) -> None:
        if attentions:
            self.attentions = attentions
        self.resnets = resnets
        if upsample:
            self.upsamplers = [Resample(upsample, down=False)]
        self.attends, self.upsamples = bool(attentions), bool(upsample)

    def forward(self, hidden: Tensor, res_samples: tuple[Tensor, ...], temb: Tensor, encoder: Tensor) -> Tensor:
        """The states of the level above."""
        for index, resnet in enumerate(self.resnets):
            res_hidden = res_samples[-1]
            res_samples = res_samples[:-1]
            hidden = ops.cat([hidden, res_hidden], 1)
            hidden = run_checkpointed(resnet, hidden, temb)
            if self.attends:
                hidden = self.attentions[index](hidden, encoder)
        if self.upsamples:
            hidden = self.upsamplers[0](hidden)
        return hidden


class Inputs(NamedTuple):
    """What a UNet is given beside the latents: time step [b], text [b, t, c]; SDXL's pooled text and sizes [b, 6]."""

    timestep: Tensor
    encoder: Tensor
    text_embeds: Tensor | None
    time_ids: Tensor | None


class UNet2DConditionModel(Denoiser):
    """The denoiser of Stable Diffusion before 3."""

    convolutional = True

    def __init__(self, c: Config) -> None:
        self.default_side = LATENT_SCALE * (c.optional("sample_size") or 64)
        channels, depth = c.integers("block_out_channels"), len(c.integers("block_out_channels"))
        self.channels, self.out_channels = c.integer("in_channels"), c.integer("out_channels")
        self.conditioned = max(self.channels - self.out_channels, 0)
        self.first, self.text_width = channels[0], c.optional("encoder_hid_dim")
        width = 4 * channels[0]
        heads, text = _each(c, "attention_head_dim", depth), _each(c, "cross_attention_dim", depth)
        layers, depths = _each(c, "layers_per_block", depth), _each(c, "transformer_layers_per_block", depth)
        self.conv_in = Convolution(self.channels, channels[0], 3, 3, padding=1)
        self.time_embedding = TimestepEmbedding(channels[0], width)
        self.projected = self.text_width is not None
        if self.text_width is not None:
            self.encoder_hid_proj = Linear(self.text_width, text[0], bias=True)
        self.text_width = self.text_width or text[0]
        self.added, self.time_width = c.get("addition_embed_type") == "text_time", 0
        self.prompt_calls, self.upcasts_vae = (_SDXL if self.added else _SD), self.added
        self.trains_with_fp32_vae, self.trained_encoders = self.added, tuple(self.prompt_calls)
        if self.added:
            self.time_width, inputs = c.integer("addition_time_embed_dim"), _added_width(c)
            self.pooled = inputs - 6 * self.time_width
            self.add_embedding = TimestepEmbedding(inputs, width)
        groups, linear = c.integer("norm_num_groups"), c.flag("use_linear_projection")
        names = count()

        def resnet(inputs: int, outputs: int) -> Module:
            return ResnetBlock2D(inputs, outputs, width, groups)

        def attention(level: int, size: int) -> Module:
            return SpatialTransformer(
                size, heads[level], text[level], depths[level], groups, linear=linear, name=f"block {next(names)}:"
            )

        down, up = _types(c, "down_block_types", depth), _types(c, "up_block_types", depth)
        self.down_blocks: list[Module] = []
        before = channels[0]
        for level, size in enumerate(channels):
            resnets = [resnet(before if i == 0 else size, size) for i in range(layers[level])]
            attentions = [attention(level, size) for _ in resnets] if down[level] else []
            self.down_blocks.append(DownBlock(resnets, attentions, size if level < depth - 1 else 0))
            before = size
        self.up_blocks: list[UpBlock] = []
        last = channels[-1]
        self.mid_block = MidBlock([resnet(last, last), resnet(last, last)], [attention(depth - 1, last)])
        before = last
        for index, size in enumerate(reversed(channels)):
            level = depth - 1 - index
            below = channels[max(level - 1, 0)]
            rows = layers[level] + 1
            resnets = [
                resnet((before if i == 0 else size) + (below if i == rows - 1 else size), size) for i in range(rows)
            ]
            attentions = [attention(level, size) for _ in resnets] if up[index] else []
            self.up_blocks.append(UpBlock(resnets, attentions, size if index < depth - 1 else 0))
            before = size
        self.conv_norm_out = GroupNorm(channels[0], groups)
        self.conv_out = Convolution(channels[0], self.out_channels, 3, 3, padding=1)

    def latent_shape(self, picture: Picture) -> Shape:
        """[b, channels, h, w]."""
        return (picture.batch, self.channels, picture.latent_height, picture.latent_width)

    def picture(
        self, batch: int, height: int | None, width: int | None, frames: int | None, text: int | None
    ) -> Picture:
        """As every denoiser's. Raises UsageError for texts longer than CLIP reads."""
        if text is not None and text > self.default_text and not self.projected:
            raise UsageError(
                f"--max-sequence-length {text} is more than the {self.default_text} tokens that CLIP reads, and "
                "pipelines of Stable Diffusion have no such argument; leave it out."
            )
        return super().picture(batch, height, width, frames, text)

    def inputs(self, tape: Tape, picture: Picture) -> Inputs:
        """What it is given beside the latents."""
        batch = picture.batch
        timestep = given(tape, batch, dtype=INT64)
        encoder = self.told(tape, "states", batch, picture.text, self.text_width or 1)
        text_embeds = self.told(tape, "pooled", batch, self.pooled) if self.added else None
        return Inputs(timestep, encoder, text_embeds, given(tape, batch, 6) if self.added else None)

    def predict(self, latents: Tensor, picture: Picture) -> Tensor:
        """[b, channels, h, w] to the same."""
        return self.run(latents, self.inputs(latents.tape, picture))

    def run(self, sample: Tensor, inputs: Inputs, residuals: Sequence[Tensor] = ()) -> Tensor:
        """The prediction. `residuals` of a ControlNet are added to what skips to the way up, the last to the middle."""
        emb, *stays = self.embedded(sample, inputs)
        encoder = self.encoder_hid_proj(inputs.encoder) if self.projected else inputs.encoder
        sample = self.conv_in(sample)
        down_block_res_samples: tuple[Tensor, ...] = (sample,)
        for down in self.down_blocks:
            sample, res_samples = down(sample, emb, encoder)
            down_block_res_samples += res_samples
        if residuals:
            down_block_res_samples = tuple(map(ops.add, down_block_res_samples, residuals[:-1]))
            stays += down_block_res_samples
        sample = self.mid_block(sample, emb, encoder)
        if residuals:
            sample = ops.add(sample, residuals[-1])
        for up in self.up_blocks:
            res_samples = down_block_res_samples[-len(up.resnets) :]
            down_block_res_samples = down_block_res_samples[: -len(up.resnets)]
            sample = up(sample, res_samples, emb, encoder)
        sample = self.conv_norm_out(sample)
        sample = ops.silu(sample)
        output: Tensor = self.conv_out(sample)
        del stays
        return output

    def embedded(self, sample: Tensor, inputs: Inputs) -> tuple[Tensor, ...]:
        """The time step and what is added to it [b, width], and what of its making stays to the end."""
        t_emb = timestep_embedding(inputs.timestep, self.first)
        t_emb = ops.to(t_emb, sample.dtype)
        emb = self.time_embedding(t_emb)
        if inputs.text_embeds is None or inputs.time_ids is None:
            return emb, t_emb
        aug_emb = self._added(inputs.text_embeds, inputs.time_ids, emb)
        return ops.add(emb, aug_emb), t_emb, aug_emb

    def _added(self, text_embeds: Tensor, time_ids: Tensor, emb: Tensor) -> Tensor:
        """What SDXL adds to the time embedding: sizes and a pooled text."""
        time_embeds = timestep_embedding(ops.reshape(time_ids, -1), self.time_width)
        time_embeds = ops.reshape(time_embeds, text_embeds.shape[0], -1)
        add_embeds = ops.cat([text_embeds, time_embeds], -1)
        add_embeds = ops.to(add_embeds, emb.dtype)
        out: Tensor = self.add_embedding(add_embeds)
        return out


_SD = {"CLIPTextModel": CLIP}
_SDXL = {"CLIPTextModel": CLIP_HIDDEN, "CLIPTextModelWithProjection": CLIP_HIDDEN}


def _each(c: Config, key: str, depth: int) -> list[int]:
    """One value a level, where the config may have one for all."""
    if isinstance(c.get(key), (list, tuple)):
        values = c.integers(key, minimum=1)
        if len(values) != depth:
            raise ConfigError(f"{c.where} has {len(values)} values under '{key}' for {depth} levels; correct it.")
        return values
    return [c.integer(key)] * depth


def _types(c: Config, key: str, depth: int) -> list[bool]:
    """Whether each level has attention. Raises ConfigError for kinds of blocks that are not described."""
    known = {"CrossAttnDownBlock2D": True, "DownBlock2D": False, "CrossAttnUpBlock2D": True, "UpBlock2D": False}
    kinds = c.items(key) or []
    if len(kinds) != depth or any(kind not in known for kind in kinds):
        raise ConfigError(f"{c.where} has blocks under '{key}' that memcalc does not describe: {kinds}.")
    return [known[str(kind)] for kind in kinds]


def _added_width(c: Config) -> int:
    return c.integer("projection_class_embeddings_input_dim")


DEFAULTS = {
    "sample_size": None,
    "in_channels": 4,
    "out_channels": 4,
    "block_out_channels": [320, 640, 1280, 1280],
    "layers_per_block": 2,
    "transformer_layers_per_block": 1,
    "cross_attention_dim": 1280,
    "attention_head_dim": 8,
    "norm_num_groups": 32,
    "use_linear_projection": False,
    "addition_embed_type": None,
    "addition_time_embed_dim": None,
    "projection_class_embeddings_input_dim": None,
    "encoder_hid_dim": None,
    "encoder_hid_dim_type": None,
    "down_block_types": ["CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"],
    "up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"],
}

FAMILIES = table(
    Family(
        "UNet2DConditionModel",
        lambda c, _: UNet2DConditionModel(c),
        DEFAULTS,
        blocks="encoder",
        attention="sdpa",
        supports="training, inference, LoRA",
        verified="runs of diffusers on PyTorch's allocator",
    )
)
