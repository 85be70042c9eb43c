"""CLIP and SigLIP: a text tower and a vision tower, trained to match texts and images. One image per text."""

from __future__ import annotations

from typing import Any

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.config.reader import Config
from memcalc.errors import ConfigError
from memcalc.models.common.heads import unknown_head
from memcalc.models.common.image_models import ImageClassifier, ImageEmbedder, picture
from memcalc.models.family import Family, table
from memcalc.models.vision_towers.clip_siglip import (
    CLIP_TEXT,
    CLIP_VISION,
    SIGLIP_TEXT,
    SIGLIP_VISION,
    TextTower,
    clip_vision,
    siglip_vision,
)
from memcalc.nn.layers.linear import Linear
from memcalc.nn.layers.losses import in_batch_loss
from memcalc.nn.layers.vision_transformer import VisionTower
from memcalc.nn.model import Batch, Network, Outputs
from memcalc.nn.module import Parameter
from memcalc.tables.dtypes import FP32, INT64


class ClipModel(Network):
    """Both towers: texts and images of a batch, matched by their cosines.

    `projected` is the width of projections after the towers (CLIP); `sigmoid` says that each pair is judged by itself
    (SigLIP) instead of against all others.
    """

    def __init__(
        self, c: Config, text: TextTower, vision: VisionTower, sides: tuple[Config, Config], *, sigmoid: bool
    ) -> None:
        self.text_model = text
        self.vision_model = vision
        self.visual_projection = self.text_projection = self.logit_bias = None
        self.logit_scale = Parameter(*((1,) if sigmoid else ()), group="head")
        if sigmoid:
            self.logit_bias = Parameter(1, group="head")
        else:
            width = c.integer("projection_dim")
            self.visual_projection = Linear(sides[1].integer("hidden_size"), width, group="head")
            self.text_projection = Linear(sides[0].integer("hidden_size"), width, group="head")
        self.vision_config = sides[1]

    def forward(self, batch: Batch) -> Outputs:
        """Loss and similarities [b, b]."""
        seen: tuple[Any, ...] = self.vision_model(picture(batch, self.vision_config))
        if self.visual_projection is not None:
            seen = seen[0], self.visual_projection(seen[1])
        read: tuple[Any, ...] = self.text_model(batch.ids, batch.padding)
        if self.text_projection is not None:
            read = read[0], self.text_projection(read[1])
        image, text = seen[1], read[1]
        with batch.ids.tape.scoped("head and loss"):
            length = _length if self.logit_bias is None else ops.vector_norm
            image = ops.div(image, length(image))
            text = ops.div(text, length(text))
            scores = ops.mul(ops.matmul(text, ops.transpose(image, 0, 1)), ops.exp(self.logit_scale))
            if self.logit_bias is not None:
                scores = ops.add(scores, self.logit_bias)
            loss = None
            if batch.labels is not None:
                loss = _match_loss(scores) if self.logit_bias is None else _pair_loss(scores)
        return Outputs(loss, (scores, text, image, seen, read))


def _length(x: Tensor) -> Tensor:
    squares = ops.pow(x)
    total = ops.sum(squares, -1, keepdim=True)
    return ops.pow(total, 0.5)


def _match_loss(scores: Tensor) -> Tensor:
    """Cross-entropy over texts and over images."""
    of_texts = _row_loss(scores)
    of_images = _row_loss(ops.transpose(scores, 0, 1))
    return ops.mul_scalar(ops.add(of_texts, of_images))


def _row_loss(scores: Tensor) -> Tensor:
    return ops.cross_entropy(scores, scores.tape.empty(scores.shape[:1], INT64))


def _pair_loss(scores: Tensor) -> Tensor:
    """The log-sigmoid of every pair, with the sign that says whether the two belong together."""
    tape = scores.tape
    eye = tape.empty(scores.shape, FP32)
    sign = ops.add(ops.neg(ops.empty_like(scores.detach())), ops.mul_scalar(eye))
    likelihood = ops.silu(ops.mul(sign, scores))  # the log-sigmoid keeps what SiLU keeps
    summed = ops.neg(ops.sum(likelihood))
    return ops.mean(summed, 0, keepdim=False)


class TextEmbedder(Network):
    """The text tower by itself, with its projection where the architecture has one; trained in the batch."""

    def __init__(self, c: Config, text: TextTower, *, projected: bool) -> None:
        self.text_model = text
        width = c.integer("projection_dim") if projected else 0
        self.text_projection = Linear(c.integer("hidden_size"), width, group="head") if projected else None

    def forward(self, batch: Batch) -> Outputs:
        """Loss and the texts' vectors [b, h]."""
        states, pooled = self.text_model(batch.ids, batch.padding)
        with batch.ids.tape.scoped("head and loss"):
            embedded = pooled if self.text_projection is None else self.text_projection(pooled)
            loss = None if batch.labels is None else in_batch_loss(embedded)
        return Outputs(loss, (states, embedded))


def _mean_of_patches(states: Tensor) -> Tensor:
    """The mean of the states without the class token [b, h]."""
    return ops.mean(ops.narrow(states, 1, states.shape[1] - 1), 1, keepdim=False)


def _mean(states: Tensor) -> Tensor:
    return ops.mean(states, 1, keepdim=False)


def _sides(c: Config, text: dict[str, object], vision: dict[str, object]) -> tuple[Config, Config]:
    return c.nested("text_config", text), c.nested("vision_config", vision)


def clip(c: Config, architecture: str | None) -> Network:
    """CLIP."""
    name = architecture or "CLIPModel"
    text, vision = _sides(c, CLIP_TEXT, CLIP_VISION)
    if name.endswith("ForImageClassification"):
        width = vision.integer("hidden_size")
        scores = Linear(width, c.num_labels(), bias=True, group="head")
        return ImageClassifier(c, clip_vision(vision), _mean_of_patches, scores, pixels=vision)
    if name.endswith("CLIPModel"):
        return ClipModel(c, TextTower(text, causal=True), clip_vision(vision), (text, vision), sigmoid=False)
    raise unknown_head(c, name, ("CLIPModel", "CLIPForImageClassification"))


def siglip(c: Config, architecture: str | None) -> Network:
    """SigLIP."""
    name = architecture or "SiglipModel"
    text, vision = _sides(c, SIGLIP_TEXT, SIGLIP_VISION)
    if name.endswith("ForImageClassification"):
        width = vision.integer("hidden_size")
        scores = Linear(width, c.num_labels(), bias=True, group="head")
        return ImageClassifier(c, siglip_vision(vision), _mean, scores, pixels=vision)
    if name.endswith("SiglipModel"):
        if not vision.flag("vision_use_head", True):
            raise ConfigError(
                f"{vision.where} has 'vision_use_head' false, so SiglipModel has no vector of an image to compare; "
                "correct it, or name SiglipForImageClassification."
            )
        return ClipModel(c, TextTower(text, causal=False), siglip_vision(vision), (text, vision), sigmoid=True)
    raise unknown_head(c, name, ("SiglipModel", "SiglipForImageClassification"))


def clip_text(c: Config, architecture: str | None) -> Network:
    """CLIP's text tower, as image generators use it."""
    return TextEmbedder(c, TextTower(c, causal=True), projected=(architecture or "").endswith("WithProjection"))


def siglip_text(c: Config, architecture: str | None) -> Network:
    """SigLIP's text tower."""
    return TextEmbedder(c, TextTower(c, causal=False), projected=False)


def clip_image(c: Config, architecture: str | None) -> Network:
    """CLIP's vision tower."""
    projected = (architecture or "").endswith("WithProjection")
    projection = Linear(c.integer("hidden_size"), c.integer("projection_dim"), group="head") if projected else None
    return ImageEmbedder(c, clip_vision(c), projection)


def siglip_image(c: Config, architecture: str | None) -> Network:
    """SigLIP's vision tower."""
    return ImageEmbedder(c, siglip_vision(c))


_SOURCE = "exact counts; classification measured, the contrastive loss read from source"
_COUNTS = "exact counts; forward and backward of the tower measured in the whole model"
FAMILIES = table(
    Family("clip", clip, {"projection_dim": 512}, blocks="encoder", verified=_SOURCE),
    Family("siglip", siglip, {}, blocks="encoder", verified=_SOURCE),
    Family("clip_text_model", clip_text, CLIP_TEXT, blocks="encoder", verified=_COUNTS),
    Family("siglip_text_model", siglip_text, SIGLIP_TEXT, blocks="encoder", verified=_COUNTS),
    Family("clip_vision_model", clip_image, CLIP_VISION, blocks="encoder", verified=_COUNTS),
    Family("siglip_vision_model", siglip_image, SIGLIP_VISION, blocks="encoder", verified=_COUNTS),
)
