"""How large images are, as people give them: one side, or width and height, within limits of pixels."""

from __future__ import annotations

from math import ceil, floor, sqrt
from typing import NamedTuple


class ImageSides(NamedTuple):
    """Height and width of an image in pixels, and the limits of its area that a processor keeps (None: none)."""

    height: int
    width: int
    min_pixels: int | None = None
    max_pixels: int | None = None

    def fitted(self, factor: int) -> tuple[int, int]:
        """Height and width in multiples of `factor`, within the limits: `smart_resize` of Qwen-VL's processors."""
        height, width = (max(1, round(side / factor)) * factor for side in (self.height, self.width))
        if self.max_pixels is not None and height * width > self.max_pixels:
            scale = sqrt(self.height * self.width / self.max_pixels)
            height, width = (max(factor, floor(side / scale / factor) * factor) for side in (self.height, self.width))
        elif self.min_pixels is not None and height * width < self.min_pixels:
            scale = sqrt(self.min_pixels / (self.height * self.width))
            height, width = (ceil(side * scale / factor) * factor for side in (self.height, self.width))
        return height, width

    def within(self, longest: int, factor: int) -> tuple[int, int]:
        """Height and width in whole multiples of `factor`, rounded up, the longer no more than `longest` (Pixtral)."""
        ratio = max(self.height / longest, self.width / longest, 1)
        height, width = (-(-floor(side / ratio) // factor) * factor for side in (self.height, self.width))
        return height, width


ImageSize = int | ImageSides | None
"""One side of a square image, or both; None for the model's own."""


def side_or(size: ImageSize, own: int) -> int:
    """The side of a square image of `size`, or the model's own."""
    return size if isinstance(size, int) else own
