"""Vision encoders of vision-language models: how many tokens an image becomes, and which of its features are read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.common.image_sides import ImageSides, ImageSize
from memcalc.config.reader import Config
from memcalc.errors import ConfigError, UsageError
from memcalc.nn.model import Batch
from memcalc.nn.module import Module

DEFAULT_SIDE = 448
"""Height and width of an image in pixels if neither the config nor `--image-size` gives them."""


class ImageFeatures(NamedTuple):
    """Features of images [images, tokens, h], or one [tokens, h] an image, and what the output object keeps besides."""

    features: Tensor | Sequence[Tensor]
    returned: tuple[Any, ...]


class VisionEncoder(Module):
    """A vision tower and its projection to the decoder's width. `config` is the vision config."""

    config: Config
    count: int
    """Tokens of an image of the config's size."""
    frames_per_image: int | None = None
    """How many frames of a video are read as one image; None where a video is read in another way, or not at all."""
    limits_whole_videos = False
    """Whether the processor's limits of pixels are those of all frames of a video together."""

    def tokens(self, size: ImageSize) -> int:
        """How many tokens an image of `size` pixels becomes (None: of the config's size).

        Raises UsageError for another size, unless the encoder takes several.
        """
        check_size(self.config, size)
        return self.count

    def image_side(self, size: ImageSize) -> int:
        """Height of an image in pixels, where one of `size` was asked for."""
        return size if isinstance(size, int) else self.config.sides("image_size")[0]

    def encode_images(self, batch: Batch) -> ImageFeatures:
        """Features of the images of a batch."""
        return self(batch.pixels(self.config, batch.images))  # type: ignore[no-any-return]


class DynamicResolutionEncoder(VisionEncoder):
    """A vision encoder that takes images of any size.

    token: height and width in pixels of one token; images are rounded to whole tokens.
    most: the processor rounds up instead, and shrinks images that are larger than this (Pixtral).
    """

    def __init__(self, config: Config, token: int, most: int | None = None) -> None:
        self.config = config
        self.token, self.most = token, most

    def image_side(self, size: ImageSize) -> int:
        """Height and width of an image in pixels."""
        return self.sides(size)[0]

    def sides(self, size: ImageSize) -> tuple[int, int]:
        """Height and width of an image in pixels."""
        asked = size if isinstance(size, ImageSides) else ImageSides(size or DEFAULT_SIDE, size or DEFAULT_SIDE)
        if self.most is not None:
            return asked.within(self.most, self.token)
        return asked.fitted(self.token)

    def tokens(self, size: ImageSize) -> int:
        """As many as fit into the image."""
        height, width = self.sides(size)
        return (height // self.token) * (width // self.token)

    def encode_images(self, batch: Batch) -> ImageFeatures:
        """Features of the images of a batch."""
        return self(batch.pixels(self.config, batch.images, self.sides(batch.image_size)))  # type: ignore[no-any-return]


def config_side(v: Config) -> int:
    """Height of the images of a vision config."""
    given = v.get("image_size")
    if isinstance(given, (list, tuple)):
        v = v.replaced(image_size=given[0] if given else None)
    return v.integer("image_size")


def check_size(v: Config, size: ImageSize) -> None:
    """Refuse images of another size than the vision config's: such a tower has a position for every patch."""
    if size is not None and v.get("image_size") not in (size, [size, size]):
        raise UsageError(
            f"--image-size {size} does not fit this model, which reads images of 'image_size' "
            f"{v.get('image_size')} only; leave it out."
        )


def feature_layers(layers: object, depth: int, where: str) -> tuple[int, ...]:
    """`vision_feature_layer`, one index or several, from the end if negative, as indices of states 0 .. depth."""
    given = layers if isinstance(layers, (list, tuple)) else [layers]
    out = []
    for index in given:
        if isinstance(index, bool) or not isinstance(index, int) or not -depth - 1 <= index <= depth:
            raise ConfigError(
                f"{where} gives 'vision_feature_layer' as {layers!r}, but there are {depth} layers; correct it."
            )
        out.append(index % (depth + 1))
    return tuple(out)


def per_image(features: Tensor) -> list[Tensor]:
    """Features [images, tokens, h] as one tensor an image."""
    return ops.unbind(features, 0)
