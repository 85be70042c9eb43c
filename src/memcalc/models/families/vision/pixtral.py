"""Pixtral's tower by itself."""

from __future__ import annotations

from memcalc.common.image_sides import ImageSize
from memcalc.config.reader import Config
from memcalc.models.common.vision_encoder import DynamicResolutionEncoder, config_side
from memcalc.models.family import Family, table
from memcalc.models.vision_towers.pixtral import PIXTRAL, PixtralTower
from memcalc.nn.model import Batch, Network, Outputs


class PixtralVisionModel(Network):
    """Hidden states of the patches of all images. Transformers gives it neither a head nor a loss."""

    reads_text = False
    resizable_input = True

    def __init__(self, c: Config) -> None:
        self.tower = PixtralTower(c, ())
        self.size = DynamicResolutionEncoder(c, c.integer("patch_size"), config_side(c))
        self.config = c

    def image_side(self, size: ImageSize) -> int | None:
        """Height and width of an image in pixels."""
        return self.size.image_side(size)

    def forward(self, batch: Batch) -> Outputs:
        """Hidden states [1, n, h]."""
        side = self.size.image_side(batch.image_size)
        states, _, _ = self.tower(batch.pixels(self.config, sides=(side, side)))
        return Outputs(None, (states,))


def pixtral(c: Config, architecture: str | None) -> Network:
    """The vision tower of Pixtral 12B and of Mistral 3."""
    return PixtralVisionModel(c)


FAMILIES = table(
    Family(
        "pixtral",
        pixtral,
        PIXTRAL,
        blocks="encoder",
        supports="inference",
        verified="forward of the tower measured in LLaVA and Mistral 3",
    )
)
