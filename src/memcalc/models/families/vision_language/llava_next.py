"""LLaVA-NeXT and LLaVA-OneVision: an image is read whole and in tiles, whose features are put together again."""

from __future__ import annotations

from functools import partial
from math import sqrt

from memcalc import ops
from memcalc.autograd.tape import OVERHEAD
from memcalc.autograd.tensor import Tensor
from memcalc.common.escaping import quoted
from memcalc.common.image_sides import ImageSize, side_or
from memcalc.config.reader import Config
from memcalc.errors import ConfigError
from memcalc.models.common.vision_encoder import ImageFeatures
from memcalc.models.common.vision_language import VisionLanguage, is_tied, language_model
from memcalc.models.families.vision_language.llava import LlavaVisionEncoder
from memcalc.models.family import Family, sizes, table, vit_sizes
from memcalc.models.vision_towers.registry import vision_config
from memcalc.nn.layers.equal_pieces import Repeat, each_piece
from memcalc.nn.layers.vision_transformer import grid_of
from memcalc.nn.model import IMAGES, Batch, Network
from memcalc.nn.module import Parameter
from memcalc.nn.run_context import run_context
from memcalc.nn.towers import as_tower

ONE_BY_ONE = 64
"""So many images are put together one by one, as the allocator sees them; of more, one stands for many."""


class LlavaNextVisionEncoder(LlavaVisionEncoder):
    """The image in the grid of tiles that fits it best, and whole; a token stands for the end of each row.

    With `most`, a picture of more patches than so many tiles have is made smaller.
    """

    def __init__(self, c: Config, v: Config, width: int, most: int | None = None) -> None:
        super().__init__(c, v, width)
        self.image_newline = Parameter(width)
        self.side = grid_of(v)[0]
        self.grids = _resolutions(c)
        self.most = most

    def image_side(self, size: ImageSize) -> int:
        """Height and width of an image in pixels: the tower's, unless others are asked for."""
        return side_or(size, self.config.integer("image_size"))

    def tiles(self, size: ImageSize) -> tuple[int, int]:
        """Rows and columns of tiles."""
        height, width = best_resolution(self.image_side(size), self.grids)
        tile = self.config.integer("image_size")
        return -(-height // tile), -(-width // tile)

    def picture(self, size: ImageSize) -> tuple[int, int, tuple[int, int] | None]:
        """Rows and columns of patches of a square image in its grid, and those that it is made smaller to."""
        rows, columns = (count * self.side for count in self.tiles(size))
        if columns > rows:
            columns -= 2 * ((columns - rows) // 2)
        else:
            rows -= 2 * ((rows - columns) // 2)
        ratio = sqrt(rows * columns / (self.most * self.side**2)) if self.most else 0.0
        return rows, columns, (int(rows // ratio), int(columns // ratio)) if ratio > 1.1 else None

    def tokens(self, size: ImageSize) -> int:
        """Patches of the whole image, and of the tiles, with an end of each row."""
        rows, columns, smaller = self.picture(size)
        rows, columns = smaller or (rows, columns)
        return self.count + rows * (columns + 1)

    def encode_images(self, batch: Batch) -> ImageFeatures:
        """What it makes of the images of a batch."""
        rows, columns = self.tiles(batch.image_size)
        images, side = batch.ids.shape[0] * batch.images, self.config.integer("image_size")
        tape = batch.ids.tape
        shape = (images, rows * columns + 1, self.config.integer("num_channels"), side, side)
        pixels = tape.external_tensor(shape, run_context(tape).weights_dtype, OVERHEAD, IMAGES)
        return self(pixels, batch.image_size)

    def forward(self, pixels: Tensor, size: ImageSize = None) -> ImageFeatures:
        """Pixels [images, tiles, c, height, width] to features, one tensor for each image."""
        images, tiles = pixels.shape[:2]
        listed = ops.unbind(pixels, 0)
        pixels = ops.cat(listed, 0)
        states, _pooled, kept = self.vision_tower(pixels)
        del _pooled
        selected = ops.cat(kept, -1) if self.several else kept[0]
        if self.cuts:
            selected = ops.narrow(selected, 1, selected.shape[1] - 1)
        features = self.multi_modal_projector(selected)
        lengths = [tiles] * images if images <= ONE_BY_ONE else [Repeat([tiles], images)]
        packed = each_piece(partial(self._packed, size), lengths, [features], 0, joined=0)
        return ImageFeatures(packed, (states, kept))

    def _packed(self, size: ImageSize, piece: Tensor) -> Tensor:
        """Features [tiles, patches, width] of an image as one sequence."""
        (down, across), (rows, columns, smaller) = self.tiles(size), self.picture(size)
        base = ops.select(piece, 0)
        image = ops.narrow(piece, 0, piece.shape[0] - 1)
        image = ops.view(image, down, across, self.side, self.side, -1)
        image = ops.clone(ops.permute(image, 4, 0, 2, 1, 3), contiguous=True)
        image = ops.view(image, image.shape[0], down * self.side, across * self.side)
        image = ops.narrow(ops.narrow(image, 1, rows), 2, columns)
        if smaller is not None:
            image = ops.interpolate(ops.unsqueeze(image, 0), smaller)
            image = ops.select(image, 0)
        image = ops.cat((image, self._ends(image)), -1)
        image = ops.transpose(ops.view(image, image.shape[0], -1), 0, 1)
        return ops.cat((base, image), 0)

    def _ends(self, image: Tensor) -> Tensor:
        """The token at the end of every row of image [width, rows, columns]."""
        token = ops.unsqueeze(ops.unsqueeze(self.image_newline, -1), -1)
        return ops.to(ops.expand(token, *image.shape[:-1], 1), image.dtype)


def _resolutions(c: Config) -> list[tuple[int, int]]:
    """Heights and widths of `image_grid_pinpoints`."""
    grids = []
    for given in c.items("image_grid_pinpoints") or []:
        if not isinstance(given, (list, tuple)) or len(given) != 2:
            raise ConfigError(f"{c.where} gives {given!r} in 'image_grid_pinpoints', which is no height and width.")
        pair = Config({"height": given[0], "width": given[1]}, where=f"{c.where}'s 'image_grid_pinpoints'")
        grids.append((pair.integer("height"), pair.integer("width")))
    if not grids:
        raise ConfigError(f"{c.where} has no 'image_grid_pinpoints'; leave the key out for the usual ones.")
    return grids


def best_resolution(side: int, grids: list[tuple[int, int]]) -> tuple[int, int]:
    """The grid in which most of a square image's pixels are left, and of those the one with the least padding."""

    def merit(grid: tuple[int, int]) -> tuple[int, int]:
        height, width = grid
        scaled = min(height, width)
        left = min(scaled**2, side**2)
        return left, left - height * width

    return max(grids, key=merit)


def llava_next(c: Config, architecture: str | None) -> Network:
    """LLaVA 1.6 (NeXT)."""
    v = vision_config(c, "clip_vision_model", _NEXT_TOWER if not c.section("vision_config") else None)
    text = language_model(c, "llama", tied=c.flag("tie_word_embeddings"))
    vision_encoder = LlavaNextVisionEncoder(c, v, text.model.lm_head.weight.shape[1])
    as_tower(vision_encoder)
    return VisionLanguage(vision_encoder, text)


def llava_onevision(c: Config, architecture: str | None) -> Network:
    """LLaVA-OneVision."""
    v = vision_config(c, "siglip_vision_model", _ONE_TOWER if not c.section("vision_config") else None)
    text = language_model(c, "qwen2", tied=is_tied(c))
    most = c.text("vision_aspect_ratio").removeprefix("anyres_max_")
    if not most.isdigit():
        raise ConfigError(
            f"{c.where} gives 'vision_aspect_ratio' as {quoted(c.text('vision_aspect_ratio'))}; memcalc knows "
            f"'anyres_max_9' and other numbers."
        )
    vision_encoder = LlavaNextVisionEncoder(c, v, text.model.lm_head.weight.shape[1], int(most))
    as_tower(vision_encoder)
    return VisionLanguage(vision_encoder, text, videos=True)


_NEXT_TOWER: dict[str, object] = sizes((32000, 1024, 4096, 24, 16, 0, 0), patch_size=14, image_size=336)
_ONE_TOWER: dict[str, object] = vit_sizes((1152, 4304, 26, 16, 384, 14, 0), vision_use_head=False)
_SIDES = [384 * count for count in range(1, 7)]

FAMILIES = table(
    Family(
        "llava_next",
        llava_next,
        {
            "projector_hidden_act": "gelu",
            "vision_feature_select_strategy": "default",
            "vision_feature_layer": -2,
            "multimodal_projector_bias": True,
            "tie_word_embeddings": False,
            "image_grid_pinpoints": [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]],
        },
        kinds="vision tower, decoder",
        verified="measured rows",
    ),
    Family(
        "llava_onevision",
        llava_onevision,
        {
            "projector_hidden_act": "gelu",
            "vision_feature_select_strategy": "full",
            "vision_feature_layer": -1,
            "multimodal_projector_bias": True,
            "tie_word_embeddings": False,
            "vision_aspect_ratio": "anyres_max_9",
            "image_grid_pinpoints": [[height, width] for height in _SIDES for width in _SIDES],
        },
        kinds="vision tower, decoder",
    ),
)
