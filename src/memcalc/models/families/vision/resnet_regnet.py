"""Convolutional networks whose layers are normalised over the batch: ResNet and RegNet."""

from __future__ import annotations

from collections.abc import Callable

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.config.reader import Config
from memcalc.errors import ConfigError
from memcalc.models.common.heads import with_head
from memcalc.models.common.image_models import ImageClassifier
from memcalc.models.family import Family, table
from memcalc.nn.layers.batchnorm_conv import ConvLayer, SqueezeExcitation, mean_of_places
from memcalc.nn.layers.linear import Linear
from memcalc.nn.layers.mlp import activation
from memcalc.nn.layers.vision_transformer import Seen, VisionTower
from memcalc.nn.model import Network
from memcalc.nn.module import Module
from memcalc.nn.stack import Stack


class ResidualLayer(Module):
    """act(layers(x) + shortcut(x)), the sum in place; a shortcut of its own where the shape changes."""

    scope = "residual stream"
    supports_checkpointing = False

    def __init__(self, inputs: int, outputs: int, stride: int, act: str, layers: list[Module]) -> None:
        changes = inputs != outputs or stride != 1
        self.shortcut = ConvLayer(inputs, outputs, 1, stride, None) if changes else None
        self.layer = layers
        self.act = activation(act)

    def forward(self, hidden: Tensor) -> Tensor:
        """[b, c, height, width] to [b, c', height', width']."""
        residual = hidden
        hidden = _through(self.layer, hidden)
        if self.shortcut is not None:
            residual = self.shortcut(residual)
        hidden = ops.add_(hidden, residual)
        return self.act(hidden)


def _through(layers: list[Module], hidden: Tensor) -> Tensor:
    for layer in layers:
        hidden = layer(hidden)
    return hidden


Make = Callable[[int, int, int], Module]
"""A layer from channels in and out, and its stride."""


class Stage(Module):
    """Layers of one width, the first of which may stride."""

    def __init__(self, number: int, inputs: int, outputs: int, stride: int, depth: int, make: Make) -> None:
        def layer(index: int) -> Module:
            return make(outputs, outputs, 1) if index else make(inputs, outputs, stride)

        self.layers = Stack(["layer"] * depth, layer, name=f"stage {number} layer")

    def forward(self, states: Tensor) -> Tensor:
        """[b, c, height, width] to [b, c', height', width']."""
        hidden = states
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


class ConvTower(VisionTower):
    """A first convolution, stages, and the mean of all places."""

    def __init__(self, c: Config, embedder: Module, make: Make, *, pooled: bool) -> None:
        widths, depths = c.integers("hidden_sizes", minimum=1), c.integers("depths", minimum=1)
        if len(widths) != len(depths) or not widths:
            raise ConfigError(f"{c.where} has 'hidden_sizes' and 'depths' of different lengths, or none; correct one.")
        self.embedder = embedder
        self.pooled = pooled
        first = 2 if c.flag("downsample_in_first_stage") else 1
        inputs = [c.integer("embedding_size"), *widths[:-1]]
        self.stages = [
            Stage(index + 1, inputs[index], widths[index], 2 if index else first, depths[index], make)
            for index in range(len(widths))
        ]
        self.width = widths[-1]

    def forward(self, pixels: Tensor) -> Seen:
        """Pixels [b, c, height, width] to the last stage's, and their mean [b, c, 1, 1]."""
        embedded = self.embedder(pixels)
        if self.pooled:
            embedded = ops.max_pool2d(embedded, 3, 2, 1)
        hidden = self._stages(embedded)
        return hidden, mean_of_places(hidden), ()

    def _stages(self, hidden: Tensor) -> Tensor:
        for stage in self.stages:
            hidden = stage(hidden)
        return hidden


class PooledClassifier(Module):
    """Classes of a pooled image [b, c, 1, 1]."""

    scope = "head and loss"

    def __init__(self, width: int, classes: int) -> None:
        self.scores = Linear(width, classes, bias=True, group="head")

    def forward(self, pooled: Tensor) -> Tensor:
        """[b, c, 1, 1] to logits [b, classes]."""
        return self.scores(ops.view(pooled, pooled.shape[0], -1))


def _classifier(c: Config, architecture: str | None, tower: ConvTower) -> Network:
    def classifier() -> Network:
        scores = PooledClassifier(tower.width, c.num_labels())
        return ImageClassifier(c, tower, None, scores, resizable_input=True)

    return with_head(c, architecture, {"ForImageClassification": classifier})


def resnet(c: Config, architecture: str | None) -> Network:
    """ResNet, with bottlenecks or without."""
    act, kind, early = c.text("hidden_act"), c.text("layer_type"), c.flag("downsample_in_bottleneck")
    if kind not in ("basic", "bottleneck"):
        raise ConfigError(f"{c.where} gives 'layer_type' as {kind!r}; ResNet has basic and bottleneck.")

    def make(inputs: int, outputs: int, stride: int) -> Module:
        if kind == "basic":
            layers: list[Module] = [
                ConvLayer(inputs, outputs, 3, stride, "relu"),
                ConvLayer(outputs, outputs, 3, 1, None),
            ]
        else:
            narrow = outputs // 4
            layers = [
                ConvLayer(inputs, narrow, 1, stride if early else 1, "relu"),
                ConvLayer(narrow, narrow, 3, 1 if early else stride, "relu"),
                ConvLayer(narrow, outputs, 1, 1, None),
            ]
        return ResidualLayer(inputs, outputs, stride, act, layers)

    embedder = ConvLayer(c.integer("num_channels"), c.integer("embedding_size"), 7, 2, act)
    return _classifier(c, architecture, ConvTower(c, embedder, make, pooled=True))


def regnet(c: Config, architecture: str | None) -> Network:
    """RegNet X and Y."""
    act, kind, groups_width = c.text("hidden_act"), c.text("layer_type"), c.integer("groups_width")
    if kind not in ("x", "y"):
        raise ConfigError(f"{c.where} gives 'layer_type' as {kind!r}; RegNet has x and y.")

    def make(inputs: int, outputs: int, stride: int) -> Module:
        groups = max(1, outputs // groups_width)
        layers: list[Module] = [
            ConvLayer(inputs, outputs, 1, 1, act),
            ConvLayer(outputs, outputs, 3, stride, act, groups=groups),
        ]
        if kind == "y":
            layers.append(SqueezeExcitation(outputs, round(inputs / 4)))
        layers.append(ConvLayer(outputs, outputs, 1, 1, None))
        return ResidualLayer(inputs, outputs, stride, act, layers)

    embedder = ConvLayer(c.integer("num_channels"), c.integer("embedding_size"), 3, 2, act)
    return _classifier(c, architecture, ConvTower(c, embedder, make, pooled=False))


_SHARED = {"num_channels": 3, "image_size": 224}
FAMILIES = table(
    Family(
        "resnet",
        resnet,
        _SHARED
        | {
            "embedding_size": 64,
            "hidden_sizes": [256, 512, 1024, 2048],
            "depths": [3, 4, 6, 3],
            "layer_type": "bottleneck",
            "hidden_act": "relu",
        },
        blocks="encoder",
        attention="eager",
        verified="measured rows",
    ),
    Family(
        "regnet",
        regnet,
        _SHARED
        | {
            "embedding_size": 32,
            "hidden_sizes": [128, 192, 512, 1088],
            "depths": [2, 6, 12, 2],
            "groups_width": 64,
            "layer_type": "y",
            "hidden_act": "relu",
            "downsample_in_first_stage": True,
        },
        blocks="encoder",
        attention="eager",
    ),
)
