"""AutoencoderKLWan (Wan 2.1 and 2.2) and AutoencoderKLQwenImage: causal convolutions over a few frames at a time.

Source: diffusers 0.42.1, models/autoencoders/{autoencoder_kl_wan,autoencoder_kl_qwenimage}.py.
"""

from __future__ import annotations

from collections.abc import Callable

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.common.sizes import Shape
from memcalc.config.reader import Config
from memcalc.errors import ConfigError
from memcalc.models.common.autoencoder import Autoencoder, Tiles, tiled
from memcalc.models.common.denoiser import Picture
from memcalc.models.families.autoencoders.wan_blocks import Decoder, Encoder
from memcalc.models.family import Family, table
from memcalc.nn.layers.causal_video import Caches, CausalConv3d


class AutoencoderKLWan(Autoencoder):
    """The autoencoder of Wan 2.1 and of Qwen-Image, and Wan 2.2's, which works on patches of pixels."""

    default_side = 480

    def __init__(self, c: Config) -> None:
        if c.items("attn_scales"):
            raise ConfigError(f"{c.where} has attention between its blocks ('attn_scales'), which is not described.")
        factors, timed = (
            c.integers("dim_mult", minimum=1),
            [bool(part) for part in c.items("temperal_downsample") or []],
        )
        self.patch = c.optional("patch_size") or 1
        self.ratio = c.integer("scale_factor_spatial")
        if self.ratio != 2 ** len(timed) * self.patch or len(factors) != len(timed) + 1 or sum(timed) != 2:
            raise ConfigError(f"{c.where} has levels that do not make the {self.ratio} pixels of a latent it names.")
        base, self.latents = c.integer("base_dim"), c.integer("z_dim")
        decoder = c.optional("decoder_base_dim") or base
        self.encoder = Encoder(c, [base * factor for factor in (1, *factors)], timed)
        self.quant_conv = CausalConv3d(2 * self.latents, 2 * self.latents, 1, 1, 1)
        self.post_quant_conv = CausalConv3d(self.latents, self.latents, 1, 1, 1)
        self.decoder = Decoder(c, [decoder * factor for factor in (factors[-1], *factors[::-1])], timed[::-1])

    def latent_shape(self, picture: Picture) -> Shape:
        """[b, z, t, h / ratio, w / ratio]."""
        sides = picture.height // self.ratio, picture.width // self.ratio
        return (picture.batch, self.latents, picture.latent_frames, *sides)

    def pixel_shape(self, picture: Picture) -> Shape:
        """[b, 3, frames, h, w]."""
        return (picture.batch, 3, picture.frames, picture.height, picture.width)

    def encoded(self, pixels: Tensor) -> Tensor:
        """[b, c, frames, h, w] to [b, 2 z, t, h', w']."""
        x = self._patches(pixels)
        if self.tiling and max(pixels.shape[3:]) > _TILE:
            ratio = self.ratio // self.patch
            tiles = Tiles(_TILE, _STRIDE, (_TILE - _STRIDE) // ratio, _STRIDE // ratio)
            time: list[Tensor] = []  # what is made of a tile stays until another begins
            return tiled(x, tiles, lambda tile: self._encoded_tile(tile, time))
        caches: Caches = {}
        out, last = _in_turn(x, 4, lambda part: self.encoder(part, caches))
        moments: Tensor = self.quant_conv(out)
        del last
        return moments

    def decoded(self, latents: Tensor) -> Tensor:
        """[b, z, t, h, w] to [b, c, frames, h', w']."""
        if self.tiling and max(latents.shape[3:]) > _TILE // self.ratio:
            side, stride = _TILE // self.patch, _STRIDE // self.patch
            tiles = Tiles(_TILE // self.ratio, _STRIDE // self.ratio, side - stride, stride)
            last: list[Tensor] = []  # the frames that were decoded last stay until there are others
            time: list[Tensor] = []  # and those of a tile until another begins
            return tiled(latents, tiles, lambda tile: self._decoded_tile(tile, time, last), self._finished)
        caches: Caches = {}
        x = self.post_quant_conv(latents)
        out, made = _in_turn(x, 1, lambda part: self.decoder(part, caches))
        out = self._pixels(out)
        out = ops.clamp(out)
        del made
        return out

    def _finished(self, out: Tensor) -> Tensor:
        out = self._pixels(out)
        return ops.clamp(out)

    def _patches(self, pixels: Tensor) -> Tensor:
        """[b, c, t, h, w] to [b, c · patch², t, h / patch, w / patch], a copy (`patchify`)."""
        if self.patch == 1:
            return pixels
        (batch, channels, frames, height, width), patch = pixels.shape, self.patch
        x = ops.view(pixels, batch, channels, frames, height // patch, patch, width // patch, patch)
        x = ops.contiguous(ops.permute(x, 0, 1, 6, 4, 2, 3, 5))
        return ops.view(x, batch, channels * patch**2, frames, height // patch, width // patch)

    def _pixels(self, out: Tensor) -> Tensor:
        """[b, c · patch², t, h, w] to [b, c, t, h · patch, w · patch], a copy (`unpatchify`)."""
        if self.patch == 1:
            return out
        (batch, channels, frames, height, width), patch = out.shape, self.patch
        x = ops.view(out, batch, channels // patch**2, patch, patch, frames, height, width)
        x = ops.contiguous(ops.permute(x, 0, 1, 4, 5, 3, 6, 2))
        return ops.view(x, batch, channels // patch**2, frames, height * patch, width * patch)

    def _encoded_tile(self, pixels: Tensor, time: list[Tensor]) -> Tensor:
        caches: Caches = {}
        time[:] = _one_after_another(pixels, 4, lambda part: self.quant_conv(self.encoder(part, caches)), time)
        return ops.cat(time, 2)

    def _decoded_tile(self, latents: Tensor, time: list[Tensor], last: list[Tensor]) -> Tensor:
        caches: Caches = {}

        def half(part: Tensor) -> Tensor:
            decoded: Tensor = self.decoder(self.post_quant_conv(part), caches)
            last[:] = [decoded]
            return decoded

        time[:] = _one_after_another(latents, 1, half, time)
        return ops.cat(time, 2)


_TILE, _STRIDE = 256, 192
"""Side of a tile in pixels (of patches, where it works on them), and from one to the next."""

_ALIKE = 3
"""Parts of a video from which on each is worked on as the one before."""


def _parts(x: Tensor, step: int) -> list[Tensor]:
    """The first frame, and then `step` frames at a time."""
    count = 1 + (x.shape[2] - 1) // step
    return [ops.narrow(x, 2, step if index else 1) for index in range(count)]


def _in_turn(x: Tensor, step: int, half: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """What `half` makes of the parts, each put behind what there is already; and of the last part."""
    first, *rest = _parts(x, step)
    out = half(first)
    made = out
    for index, part in enumerate(rest, 1):
        if _ALIKE <= index < len(rest):  # as the one before, beside less
            frames = out.shape[2] + made.shape[2]
            out = x.tape.empty((*out.shape[:2], frames, *out.shape[3:]), out.dtype)
            continue
        made = half(part)
        out = ops.cat([out, made], 2)
    return out, made


def _one_after_another(x: Tensor, step: int, half: Callable[[Tensor], Tensor], before: list[Tensor]) -> list[Tensor]:
    """What `half` makes of every part, those `before` gone."""
    before.clear()
    made: list[Tensor] = []
    parts = _parts(x, step)
    for index, part in enumerate(parts):
        alike = _ALIKE <= index < len(parts) - 1
        made.append(x.tape.empty(made[-1].shape, made[-1].dtype) if alike else half(part))
    return made


DEFAULTS: dict[str, object] = {
    "base_dim": 96,
    "decoder_base_dim": None,
    "z_dim": 16,
    "dim_mult": [1, 2, 4, 4],
    "num_res_blocks": 2,
    "attn_scales": [],
    "temperal_downsample": [False, True, True],
    "in_channels": 3,
    "out_channels": 3,
    "patch_size": None,
    "scale_factor_spatial": 8,
    "is_residual": False,
}

FAMILIES = table(
    *(
        Family(
            name,
            lambda c, _: AutoencoderKLWan(c),
            DEFAULTS,
            {"input_channels": "in_channels"},
            blocks="encoder",
            attention="sdpa",
            supports="inference",
            verified="runs of diffusers on PyTorch's allocator, exact counts",
        )
        for name in ("AutoencoderKLWan", "AutoencoderKLQwenImage")
    )
)
