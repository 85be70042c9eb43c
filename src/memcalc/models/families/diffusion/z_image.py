"""Z-Image: text and picture refined apart, then one sequence of both; each is padded to a multiple of 32 tokens.

Source: diffusers 0.42.1, models/transformers/transformer_z_image.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from memcalc import ops
from memcalc.autograd.tape import Tape
from memcalc.autograd.tensor import Tensor
from memcalc.common.sizes import Shape
from memcalc.config.reader import Config
from memcalc.errors import ConfigError
from memcalc.models.common.denoiser import Denoiser, Picture, PromptCall, given
from memcalc.models.families.diffusion.z_image_blocks import (
    CONDITIONING,
    FinalLayer,
    OfPatchSize,
    TimestepEmbedder,
    ZImageTransformerBlock,
)
from memcalc.models.family import Family, table
from memcalc.nn.layers.diffusion_norms import EagerRMSNorm
from memcalc.nn.layers.linear import Linear
from memcalc.nn.module import Parameter
from memcalc.nn.stack import Stack
from memcalc.tables.dtypes import BOOL, COMPLEX64, FP32, INT32

_MULTIPLE = 32
"""What lengths are padded to a multiple of."""


def _padded_batch(feats: Sequence[Tensor]) -> Tensor:
    """`torch.nn.utils.rnn.pad_sequence` of sequences [s, ...] of one length: [b, s, ...]."""
    first = feats[0]
    batch = first.tape.empty((len(feats), *first.shape), first.dtype)
    for one in feats:
        batch = ops.copy_slice_(batch, one)
    return batch


def _rows(x: Tensor, count: int) -> list[Tensor]:
    """x [count · s, ...] as `count` tensors [s, ...]."""
    return ops.split(x, [x.shape[0] // count] * count, 0)


class ZImageTransformer2DModel(Denoiser):
    """The denoiser of Z-Image."""

    default_text = 512
    fp32_latents = True

    def __init__(self, c: Config) -> None:
        if c.integers("all_patch_size") != [2] or c.integers("all_f_patch_size") != [1]:
            raise ConfigError(f"{c.where} has patches of other sizes than 2 pixels and 1 frame; correct it.")
        if c.optional("siglip_feat_dim") is not None:
            raise ConfigError(f"{c.where} is of Z-Image Omni, which also reads pictures; memcalc does not describe it.")
        self.channels, width, heads = c.integer("in_channels"), c.integer("dim"), c.integer("n_heads")
        self.axes, self.lengths = c.integers("axes_dims"), c.integers("axes_lens")
        if sum(self.axes) != width // heads:
            raise ConfigError(f"{c.where} has 'axes_dims' whose sum is not 'dim' / 'n_heads'; correct it.")
        self.text_width, self.prompt_calls = c.integer("cap_feat_dim"), _PROMPT_CALLS
        qk_norm, refiners = c.flag("qk_norm", True), c.integer("n_refiner_layers")

        def blocks(count: int, name: str, *, modulated: bool = True) -> Stack:
            return Stack(
                ["block"] * count,
                lambda _: ZImageTransformerBlock(width, heads, qk_norm=qk_norm, modulated=modulated),
                name=name,
            )

        self.all_x_embedder = OfPatchSize("2-1", Linear(4 * self.channels, width, bias=True))
        self.all_final_layer = OfPatchSize("2-1", FinalLayer(width, 4 * self.channels))
        self.noise_refiner = blocks(refiners, "noise refiner")
        self.context_refiner = blocks(refiners, "context refiner", modulated=False)
        self.t_embedder = TimestepEmbedder(min(width, CONDITIONING))
        self.cap_embedder = [EagerRMSNorm(self.text_width), Linear(self.text_width, width, bias=True)]
        self.x_pad_token = Parameter(1, width)
        self.cap_pad_token = Parameter(1, width)
        self.layers = blocks(c.integer("n_layers"), "block")

    def latent_shape(self, picture: Picture) -> Shape:
        """[b, channels, h, w]."""
        return (picture.batch, self.channels, picture.latent_height, picture.latent_width)

    def _sequence(self, x: Tensor, mask: Tensor, pad_token: Parameter, ids: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Tokens [b · s, h] with padding replaced, and their rotary positions: [b, s, h] and [b, s, d / 2].

        A caption's positions count its padding twice; what is too much stays behind a view.
        """
        batch, length = len(ids), x.shape[0] // len(ids)
        feats = _rows(x, batch)
        feats_cat = ops.cat(feats, 0)
        feats_cat = ops.where(mask, pad_token, feats_cat)
        feats = _rows(feats_cat, batch)
        positions = ops.cat(ids, 0)
        parts = [x.tape.empty((positions.shape[0], axis // 2), COMPLEX64) for axis in self.axes]
        freqs = _rows(ops.cat(parts, -1), batch)
        del parts, positions
        feats = [_padded_batch(feats)]
        return feats[0], ops.narrow(_padded_batch(freqs), 1, length)

    def _standing_tables(self, tape: Tape) -> None:
        """Rotary tables, which stay on the GPU from the first forward on."""
        for axis, length in zip(self.axes, self.lengths, strict=True):
            given(tape, length, axis // 2, dtype=COMPLEX64, name="rotary tables")

    def predict(self, latents: Tensor, picture: Picture) -> Tensor:
        """[b, channels, h, w] to the same."""
        return ops.stack(self._forward(latents, picture), 0)

    def _forward(self, latents: Tensor, picture: Picture) -> list[Tensor]:
        """[b, channels, h, w] to the prediction of each picture."""
        tape, batch, text = latents.tape, picture.batch, picture.text
        self._standing_tables(tape)
        t = given(tape, batch, dtype=FP32)
        captions = [given(tape, text, self.text_width) for _ in range(batch)]
        adaln_input = self.t_embedder(ops.mul_scalar(t))
        adaln_input = ops.to(adaln_input, latents.dtype)
        images, x_ids, x_masks = _patches(latents, self.channels)
        caps, cap_ids, cap_masks = _padded([(one, text, text + -text % _MULTIPLE) for one in captions])
        x = self.all_x_embedder(ops.cat(images, 0))
        del images
        x, x_freqs = self._sequence(x, _mask(x_masks), self.x_pad_token, x_ids)
        for layer in self.noise_refiner:
            x = layer(x, x_freqs, adaln_input)
        normed = self.cap_embedder[0](ops.cat(caps, 0))
        cap = self.cap_embedder[1](normed)
        del caps, normed
        cap, cap_freqs = self._sequence(cap, _mask(cap_masks), self.cap_pad_token, cap_ids)
        for layer in self.context_refiner:
            cap = layer(cap, cap_freqs)
        unified = _padded_batch([ops.cat(pair, 0) for pair in zip(_each(x), _each(cap), strict=True)])
        freqs = _padded_batch([ops.cat(pair, 0) for pair in zip(_each(x_freqs), _each(cap_freqs), strict=True)])
        for layer in self.layers:
            unified = layer(unified, freqs, adaln_input)
        unified = self.all_final_layer(unified, adaln_input)
        made = [_unpatchified(one, latents.shape) for one in ops.unbind(unified, 0)]
        del x_ids, cap_ids  # they stay to the end
        return made


def _unpatchified(x: Tensor, shape: Shape) -> Tensor:
    """Tokens [s, 4 · channels] to [channels, h, w]: a copy in the order of pixels."""
    _, channels, height, width = shape
    rows, columns = height // 2, width // 2
    x = ops.view(ops.narrow(x, 0, rows * columns), rows, columns, 2, 2, channels)
    return ops.reshape(ops.permute(x, 4, 0, 2, 1, 3), channels, height, width)


def _each(x: Tensor) -> list[Tensor]:
    """Every sequence of x [b, s, ...], whole."""
    return [ops.narrow(ops.select(x, 0), 0, x.shape[1]) for _ in range(x.shape[0])]


def _mask(masks: Sequence[Tensor]) -> Tensor:
    """All masks as one column."""
    return ops.unsqueeze(ops.cat(masks, 0), 1)


def _padded(feats: Sequence[tuple[Tensor, int, int]]) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Sequences padded to a multiple of 32 by their last token, positions of theirs and of padding, what is padding.

    feats: sequences [s, ...], s, and how many positions they are given before those of padding.
    """
    padded, ids, masks = [], [], []
    for feat, length, positions in feats:
        extra = -length % _MULTIPLE
        padded.append(ops.cat([feat, ops.repeat(ops.narrow(feat, 0, 1), extra, 1)], 0) if extra else feat)
        ids.append(feat.tape.empty((positions + extra, 3), INT32))
        masks.append(feat.tape.empty((length + extra,), BOOL))
    return padded, ids, masks


def _patches(latents: Tensor, channels: int) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Pictures [b, c, h, w] as squares of two pixels: tokens [s, 4 c] each, positions, and what is padding."""
    found = []
    for image in ops.unbind(latents, 0):
        _, height, width = image.shape
        image = ops.view(image, channels, height // 2, 2, width // 2, 2)
        patches = ops.reshape(ops.permute(image, 1, 3, 2, 4, 0), (height // 2) * (width // 2), 4 * channels)
        found.append((patches, patches.shape[0], patches.shape[0]))
    return _padded(found)


_TEMPLATE_CALL = PromptCall(hidden=(-2,), mask=True)
_PROMPT_CALLS = {"Qwen3Model": _TEMPLATE_CALL, "Qwen3ForCausalLM": _TEMPLATE_CALL}

DEFAULTS: dict[str, object] = {
    "all_patch_size": [2],
    "all_f_patch_size": [1],
    "in_channels": 16,
    "dim": 3840,
    "n_layers": 30,
    "n_refiner_layers": 2,
    "n_heads": 30,
    "n_kv_heads": 30,
    "qk_norm": True,
    "cap_feat_dim": 2560,
    "siglip_feat_dim": None,
    "axes_dims": [32, 48, 48],
    "axes_lens": [1024, 512, 512],
}

FAMILIES = table(
    Family(
        "ZImageTransformer2DModel",
        lambda c, _: ZImageTransformer2DModel(c),
        DEFAULTS,
        blocks="encoder",
        attention="sdpa",
        supports="training, inference, LoRA",
        verified="runs of diffusers on PyTorch's allocator",
    )
)
