"""What every autoencoder of a diffusion pipeline is: pixels to latents and back, whole or in tiles that overlap.

Names are those of diffusers 0.42: `latent_channels`, `sample_size`, `enable_tiling`, `enable_slicing`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from memcalc import ops
from memcalc.autograd.tape import Tape
from memcalc.autograd.tensor import Tensor
from memcalc.common.sizes import Shape
from memcalc.models.common.denoiser import Picture
from memcalc.nn.model import Network

Half = Callable[[Tensor], Tensor]
"""The encoder or the decoder of an autoencoder, on one tile or on all of a picture."""


@dataclass(frozen=True)
class Tiles:
    """How pictures are cut: `side` of a tile and `step` from one to the next in what goes in; how many pixels (or
    latents) of its result are `blended` with the neighbour's and how many are `kept`."""

    side: int
    step: int
    blended: int
    kept: int

    def cuts(self, length: int) -> list[int]:
        """The sides of the tiles along `length`."""
        return [min(self.side, length - start) for start in range(0, length, self.step)]


class Autoencoder(Network):
    """An autoencoder. `encoded` and `decoded` are its halves without tiling and slicing."""

    reads_text = False
    input_kind = "latents"
    default_side = 512
    """Pixels of a side where nobody names a size."""
    tiling = False
    """`enable_tiling()` was called."""
    slicing = False
    """`enable_slicing()` was called: one picture at a time."""
    force_upcast = False
    """In fp16 some pipelines let it decode in fp32."""

    def latent_shape(self, picture: Picture) -> Shape:
        """The shape of what it makes of a picture and takes back, before any packing."""
        raise NotImplementedError

    def pixel_shape(self, picture: Picture) -> Shape:
        """The shape of the pixels."""
        return (picture.batch, 3, picture.height, picture.width)

    def encoded(self, pixels: Tensor) -> Tensor:
        """Pixels to means and log-variances, or to latents."""
        raise NotImplementedError

    def decoded(self, latents: Tensor) -> Tensor:
        """Latents to pixels."""
        raise NotImplementedError

    def encode(self, pixels: Tensor) -> Tensor:
        """A sample of the latents of `pixels`."""
        return sampled(self.in_slices(pixels, self.encoded))

    def decode(self, latents: Tensor) -> Tensor:
        """The pixels of `latents`."""
        return self.in_slices(latents, self.decoded)

    def in_slices(self, x: Tensor, half: Half) -> Tensor:
        """What `half` makes of x, of one picture at a time where slicing is on."""
        if not self.slicing or x.shape[0] == 1:
            return half(x)
        slices = one_by_one(x.tape, [x.shape[1:]] * x.shape[0], lambda _: half(ops.narrow(x, 0, 1)))
        return ops.cat(slices, 0)


def one_by_one(tape: Tape, kinds: Sequence[Hashable], run: Callable[[int], Tensor]) -> list[Tensor]:
    """The results of all pieces, run one after another: of those of a kind the first and the last are traced.

    Of the others only the results stand: the last has all of them beside it, and so the most. The piece before it is
    traced too, as it may leave something behind.
    """
    known: dict[Hashable, Tensor] = {}
    last = set({kind: index for index, kind in enumerate(kinds)}.values())
    traced = last | {index - 1 for index in last}
    results = []
    for index, kind in enumerate(kinds):
        if kind in known and index not in traced:
            like = known[kind]
            results.append(tape.empty(like.shape, like.dtype, like.stride))
        else:
            results.append(run(index))
            known[kind] = results[-1]
    return results


def tiled(x: Tensor, tiles: Tiles, half: Half, finish: Half | None = None, *, across: Tiles | None = None) -> Tensor:
    """What `half` makes of x [..., height, width] tile by tile, blended and put together (`tiled_decode`).

    finish: what is made of the whole while its tiles are still there.
    across: how widths are cut where it is not as heights are.
    """
    across = across or tiles
    heights, widths = tiles.cuts(x.shape[-2]), across.cuts(x.shape[-1])
    places = [(height, width) for height in heights for width in widths]

    def run(index: int) -> Tensor:
        height, width = places[index]
        return half(ops.narrow(ops.narrow(x, -2, height), -1, width))

    results = one_by_one(x.tape, places, run)
    rows = [results[start : start + len(widths)] for start in range(0, len(results), len(widths))]
    del results
    result_rows = []
    for i, row in enumerate(rows):
        result_row = []
        for j, tile in enumerate(row):
            if i > 0:
                _blend(tile, -2, min(rows[i - 1][j].shape[-2], tile.shape[-2], tiles.blended))
            if j > 0:
                _blend(tile, -1, min(row[j - 1].shape[-1], tile.shape[-1], across.blended))
            kept = ops.narrow(tile, -2, min(tiles.kept, tile.shape[-2]))
            result_row.append(ops.narrow(kept, -1, min(across.kept, tile.shape[-1])))
        result_rows.append(ops.cat(result_row, -1))
    return ops.cat(result_rows, -2) if finish is None else finish(ops.cat(result_rows, -2))


def put_together(row: Sequence[Tensor], dim: int, tiles: Tiles, first: int = 0) -> Tensor:
    """Tiles along `dim`, blended and put together; of the first one `first` more is kept."""
    parts = []
    for index, tile in enumerate(row):
        if index:
            _blend(tile, dim, min(row[index - 1].shape[dim], tile.shape[dim], tiles.blended))
        kept = tiles.kept if index else tiles.kept + first
        parts.append(ops.narrow(tile, dim, min(kept, tile.shape[dim])))
    return ops.cat(parts, dim)


def _blend(tile: Tensor, dim: int, extent: int) -> None:
    """Mix the edge of a tile with its neighbour's, line by line and in place: three lines for a moment."""
    if extent:
        line = ops.select(ops.narrow(tile, dim, 1), dim % len(tile.shape))
        old, own = ops.mul_scalar(line), ops.mul_scalar(line)
        ops.add(old, own)


def sampled(moments: Tensor) -> Tensor:
    """A sample of the distribution of which `moments` [b, 2c, ...] are means and log-variances."""
    mean, logvar = ops.chunk(moments, 2, 1)
    logvar = ops.clamp(logvar)
    std = ops.exp(ops.mul_scalar(logvar))
    variance = ops.exp(logvar)
    sample = moments.tape.empty(mean.shape, mean.dtype)
    out = ops.add(mean, ops.mul(std, sample))
    del variance
    return out
