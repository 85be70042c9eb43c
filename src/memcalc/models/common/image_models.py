"""Networks that take images only, and images next to texts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.config.reader import Config
from memcalc.errors import UsageError
from memcalc.models.common.heads import with_head
from memcalc.models.common.vision_encoder import check_size
from memcalc.nn.layers.linear import Linear
from memcalc.nn.layers.losses import class_loss, in_batch_loss
from memcalc.nn.layers.vision_transformer import Reduce, VisionTower
from memcalc.nn.model import Batch, Network, Outputs
from memcalc.nn.module import Module


class ImageClassifier(Network):
    """A tower with a class per image.

    reduce: what is classified, made of the tower's hidden states; None: what the tower pooled.
    classifier: the module that gives the scores.
    pixels: the config with the image size, if that is not `c`.
    resizable_input: that size is only a default.
    """

    reads_text = False

    def __init__(
        self,
        c: Config,
        model: VisionTower,
        reduce: Reduce | None,
        classifier: Module,
        pixels: Config | None = None,
        *,
        resizable_input: bool = False,
    ) -> None:
        self.resizable_input = resizable_input
        self.model = model
        self.classifier = classifier
        self.reduce = reduce
        self.config, self.problem = pixels or c, c.problem_type()

    def inputs(self, batch: Batch) -> Tensor:
        """What the tower takes: pixels [b, c, height, width]."""
        return batch.pixels(self.config, resizable_input=self.resizable_input)

    def forward(self, batch: Batch) -> Outputs:
        """Loss and logits [b, classes]."""
        outputs = self.model(self.inputs(batch))
        with batch.ids.tape.scoped("head and loss"):
            reduced = outputs[1] if self.reduce is None else self.reduce(outputs[0])
            logits = self.classifier(reduced)
            loss = None if batch.labels is None else class_loss(logits, batch.class_labels(), self.problem)
        return Outputs(loss, (logits,))


class ImageEmbedder(Network):
    """The bare tower: one vector per image, projected if it has one, trained to tell images from each other."""

    reads_text = False

    def __init__(
        self, c: Config, model: VisionTower, projection: Module | None = None, *, resizable_input: bool = False
    ) -> None:
        self.resizable_input = resizable_input
        self.model = model
        self.projection = projection
        self.config = c

    def forward(self, batch: Batch) -> Outputs:
        """Loss and embeddings [b, h]."""
        states, pooled, _ = self.model(batch.pixels(self.config, resizable_input=self.resizable_input))
        with batch.ids.tape.scoped("head and loss"):
            embedded = ops.select(states, 1) if pooled is None else pooled
            if self.projection is not None:
                embedded = self.projection(embedded)
            loss = None if batch.labels is None else in_batch_loss(embedded)
        return Outputs(loss, (states, embedded))


def image_network(
    c: Config,
    architecture: str | None,
    tower: Callable[[bool], VisionTower],
    reduce: Reduce | None,
    width: int,
    extra: Mapping[str, Callable[[], Network]] = MappingProxyType({}),
    *,
    resizable_input: bool = False,
) -> Network:
    """An image network with the head that `architecture` names; classes of images if it names none.

    tower: makes the tower, with its pooler (the bare model) or without.
    reduce, width: as of ImageClassifier, and the width of what it classifies.
    extra: heads that only this family has.
    """
    known: dict[str, Callable[[], Network]] = {
        "ForImageClassification": lambda: ImageClassifier(
            c, tower(False), reduce, class_scores(c, width), resizable_input=resizable_input
        ),
        **extra,
        "Model": lambda: ImageEmbedder(c, tower(True), resizable_input=resizable_input),
    }
    return with_head(c, architecture, known)


def class_scores(c: Config, width: int) -> Linear:
    """The linear layer from `width` to the config's classes."""
    return Linear(width, c.num_labels(), bias=True, group="head")


def picture(batch: Batch, c: Config) -> Tensor:
    """Pixels [b, channels, height, width] of the one image with each text. Raises UsageError where others are asked
    for.
    """
    if batch.images != 1:
        raise UsageError(
            f"--images-per-sequence {batch.images} does not fit this model, which reads one image beside each "
            "text; leave it out."
        )
    check_size(c, batch.image_size)
    return batch.pixels(c)
