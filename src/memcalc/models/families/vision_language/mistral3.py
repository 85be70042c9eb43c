"""Mistral Small 3.1 and Ministral 3: Pixtral's tower, whose patches are merged by squares, and Mistral's decoder."""

from __future__ import annotations

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.config.reader import Config
from memcalc.models.common.vision_encoder import DynamicResolutionEncoder, ImageFeatures, config_side, feature_layers
from memcalc.models.common.vision_language import VisionLanguage, language_model
from memcalc.models.family import Family, table
from memcalc.models.vision_towers.registry import Projector, tower_of, vision_config
from memcalc.nn.layers.equal_pieces import Repeat, each_piece
from memcalc.nn.layers.linear import Linear
from memcalc.nn.layers.norms import RMSNorm
from memcalc.nn.model import Network
from memcalc.nn.module import Module
from memcalc.nn.towers import as_tower


class SquareMerger(Module):
    """Squares of patches laid side by side (unfold), image by image, and projected to the tower's width."""

    def __init__(self, width: int, side: int) -> None:
        self.side = side
        self.merging_layer = Linear(width * side**2, width)

    def forward(self, features: Tensor, shape: tuple[int, int, int]) -> Tensor:
        """[n, h] to [n / side², h]; `shape` is how many images there are, and of how many patches' height and width."""
        images, height, width = shape
        hidden = features.shape[-1]

        def merged(image: Tensor) -> Tensor:
            grid = ops.unsqueeze(ops.permute(ops.view(image, height, width, hidden), 2, 0, 1), 0)
            grid = ops.unfold(grid, self.side)
            return ops.unsqueeze(ops.transpose(ops.view(grid, hidden * self.side**2, -1), 0, 1), 0)

        pieces = each_piece(merged, [Repeat([height * width], images)], [features], 0)
        features = ops.squeeze(ops.cat(pieces, 1), 0)
        del pieces
        return self.merging_layer(features)


class Mistral3Projector(Projector):
    """A norm, the merging of squares, and an MLP."""

    def __init__(self, width: int, side: int, outputs: int, act: str, *, bias: bool, states: int) -> None:
        self.norm = RMSNorm(width)
        self.patch_merger = SquareMerger(width, side)
        super().__init__(width * states, outputs, act, bias=bias)

    def forward(self, features: Tensor, shape: tuple[int, int, int] = (1, 1, 1)) -> Tensor:
        """[n, h] to [n / side², out]."""
        features = self.norm(features)
        features = self.patch_merger(features, shape)
        return super().forward(features)


class Mistral3VisionEncoder(DynamicResolutionEncoder):
    """States of chosen layers, merged by squares of patches."""

    def __init__(self, c: Config, v: Config, width: int) -> None:
        super().__init__(v, v.integer("patch_size") * c.integer("spatial_merge_size"), config_side(v))
        layers = c.get("vision_feature_layer")
        keep = feature_layers(layers, v.integer("num_hidden_layers"), c.where)
        self.several = isinstance(layers, (list, tuple))
        self.vision_tower = tower_of(v, keep)
        self.multi_modal_projector = Mistral3Projector(
            v.integer("hidden_size"),
            c.integer("spatial_merge_size"),
            width,
            c.text("projector_hidden_act"),
            bias=c.flag("multimodal_projector_bias"),
            states=len(keep),
        )

    def forward(self, pixels: Tensor) -> ImageFeatures:
        """Pixels [images, c, height, width] to features, one tensor for each image."""
        states, _pooled, kept = self.vision_tower(pixels)
        del _pooled
        joined = ops.cat(kept, -1) if self.several else kept[0]
        images, _, height, width = pixels.shape
        patch = self.vision_tower.patch_conv.stride[0]
        features = self.multi_modal_projector(ops.squeeze(joined, 0), (images, height // patch, width // patch))
        found = ops.split(features, [features.shape[0] // images] * images, 0)
        return ImageFeatures(found, (states, kept))


def mistral3(c: Config, architecture: str | None) -> Network:
    """Mistral 3."""
    v = vision_config(c, "pixtral", _TOWER if not c.section("vision_config") else None)
    text = language_model(c, "mistral", tied=_tied(c))
    vision_encoder = Mistral3VisionEncoder(c, v, text.model.lm_head.weight.shape[1])
    as_tower(vision_encoder)
    return VisionLanguage(vision_encoder, text)


def _tied(c: Config) -> bool:
    """Whether head and embedding are one: as the config says, for the whole model or for its decoder.

    Where it says nothing, Transformers 5 ties them. Transformers 4 asked the decoder's class, of which only Ministral's
    ties them; what it wrote holds a head of its own, which Transformers 5 keeps when it loads it.
    """
    text = c.section("text_config")
    for section in (c.values, text):
        if isinstance(stated := section.get("tie_word_embeddings"), bool):
            return stated
    old = str(c.get("transformers_version") or "").startswith("4.") or c.has("torch_dtype")
    return c.flag("tie_word_embeddings") and not (old and text.get("model_type") == "mistral")


_TOWER: dict[str, object] = {"image_size": 1540, "patch_size": 14}

FAMILIES = table(
    Family(
        "mistral3",
        mistral3,
        {
            "projector_hidden_act": "gelu",
            "vision_feature_layer": -1,
            "spatial_merge_size": 2,
            "tie_word_embeddings": True,
        },
        kinds="vision tower, decoder",
    )
)
