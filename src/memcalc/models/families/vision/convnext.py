"""ConvNeXt, in both versions: wide convolutions of each channel by itself, and MLPs over channels."""

from __future__ import annotations

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.config.reader import Config
from memcalc.errors import ConfigError
from memcalc.models.common.image_models import image_network
from memcalc.models.family import Family, table
from memcalc.nn.layers.batchnorm_conv import Convolution2d
from memcalc.nn.layers.linear import Linear
from memcalc.nn.layers.mlp import activation
from memcalc.nn.layers.norms import LayerNorm
from memcalc.nn.layers.vision_transformer import Seen, VisionTower, drop_path
from memcalc.nn.model import Network
from memcalc.nn.module import Module, Parameter
from memcalc.nn.stack import Stack


class ChannelsFirstLayerNorm(Module):
    """LayerNorm over the channels of an image [b, c, height, width]."""

    def __init__(self, channels: int) -> None:
        self.norm = LayerNorm(channels)

    def forward(self, states: Tensor) -> Tensor:
        """[b, c, height, width] to the same, the channels innermost."""
        states = ops.permute(states, 0, 2, 3, 1)
        states = self.norm(states)
        return ops.permute(states, 0, 3, 1, 2)


class GlobalResponseNorm(Module):
    """Channels [b, rows, columns, c] weighed by their size over the image, relative to the others (ConvNeXt V2)."""

    scope = "norms"

    def __init__(self, width: int) -> None:
        self.weight = Parameter(1, 1, 1, width, group="norms")
        self.bias = Parameter(1, 1, 1, width, group="norms")

    def forward(self, states: Tensor) -> Tensor:
        """[b, rows, columns, c] to the same."""
        lengths = ops.vector_norm(states, 1, 2)
        shares = ops.div(lengths, ops.add_scalar(ops.mean(lengths)))
        states = ops.add(ops.add(ops.mul(self.weight, ops.mul(states, shares)), self.bias), states)
        return states  # noqa: RET504 (the name is what lets the old states go last)


class ConvNextLayer(Module):
    """A wide convolution of each channel by itself, LayerNorm, an MLP over channels, a trained factor, add.

    With `second`, a norm stands in the MLP and there is no factor (ConvNeXt V2).
    """

    scope = "residual stream"
    supports_checkpointing = False

    def __init__(self, c: Config, width: int, dropped: float, *, second: bool) -> None:
        scaled = not second and c.number("layer_scale_init_value") > 0
        self.layer_scale_parameter = Parameter(width, group="norms") if scaled else None
        self.dwconv = Convolution2d(width, width, 7, 1, groups=width, bias=True)
        self.layernorm = LayerNorm(width)
        self.pwconv1 = Linear(width, 4 * width, bias=True, group="MLP")
        self.act = activation(c.text("hidden_act"))
        self.grn = GlobalResponseNorm(4 * width) if second else None
        self.pwconv2 = Linear(4 * width, width, bias=True, group="MLP")
        self.dropped = dropped

    def forward(self, states: Tensor) -> Tensor:
        """[b, c, height, width] to [b, c, height, width]."""
        residual = states
        states = self.dwconv(states)
        states = ops.permute(states, 0, 2, 3, 1)
        states = self.layernorm(states)
        states = self.pwconv1(states)
        states = self.act(states)
        if self.grn is not None:
            states = self.grn(states)
        states = self.pwconv2(states)
        if self.layer_scale_parameter is not None:
            states = ops.mul(self.layer_scale_parameter, states)
        states = ops.permute(states, 0, 3, 1, 2)
        return ops.add(residual, drop_path(states, self.dropped))


class ConvNextStage(Module):
    """A norm and a convolution that halves the image, and layers."""

    def __init__(self, c: Config, number: int, inputs: int, outputs: int, rates: list[float], *, second: bool) -> None:
        strides = number > 1
        self.downsampling_layer: list[Module] = (
            [ChannelsFirstLayerNorm(inputs), Convolution2d(inputs, outputs, 2, 2, bias=True, padding=0)]
            if strides
            else []
        )
        kinds = [rate > 0 for rate in rates]

        def layer(index: int) -> Module:
            return ConvNextLayer(c, outputs, rates[index], second=second)

        self.layers = Stack(kinds, layer, name=f"stage {number} layer")

    def forward(self, states: Tensor) -> Tensor:
        """[b, c, height, width] to [b, c', height / 2, width / 2]."""
        for part in self.downsampling_layer:
            states = part(states)
        for layer in self.layers:
            states = layer(states)
        return states


class ConvNextTower(VisionTower):
    """Patches, stages, and LayerNorm of the mean of all places."""

    def __init__(self, c: Config, *, second: bool) -> None:
        widths, depths = c.integers("hidden_sizes", minimum=1), c.integers("depths", minimum=1)
        if len(widths) != len(depths) or not widths:
            raise ConfigError(f"{c.where} has 'hidden_sizes' and 'depths' of different lengths, or none; correct one.")
        patch, rate, total = c.integer("patch_size"), c.probability("drop_path_rate"), sum(depths)
        self.patch_embeddings = Convolution2d(c.integer("num_channels"), widths[0], patch, patch, bias=True, padding=0)
        self.norm = ChannelsFirstLayerNorm(widths[0])
        rates = [rate * index / max(total - 1, 1) for index in range(total)]
        self.stages = [
            ConvNextStage(
                c,
                index + 1,
                widths[max(index - 1, 0)],
                widths[index],
                rates[sum(depths[:index]) : sum(depths[: index + 1])],
                second=second,
            )
            for index in range(len(widths))
        ]
        self.layernorm = LayerNorm(widths[-1])
        self.width = widths[-1]

    def forward(self, pixels: Tensor) -> Seen:
        """Pixels [b, c, height, width] to the last stage's, and their normalised mean [b, c]."""
        embedded = self.norm(self.patch_embeddings(pixels))
        hidden = self._stages(embedded)
        batch, width = hidden.shape[:2]
        return hidden, self.layernorm(ops.mean(ops.view(hidden, batch, width, -1), keepdim=False)), ()

    def _stages(self, hidden: Tensor) -> Tensor:
        for stage in self.stages:
            hidden = stage(hidden)
        return hidden


def _next(c: Config, architecture: str | None, *, second: bool) -> Network:
    tower = ConvNextTower(c, second=second)
    return image_network(c, architecture, lambda _: tower, None, tower.width, resizable_input=True)


def convnext(c: Config, architecture: str | None) -> Network:
    """ConvNeXt."""
    return _next(c, architecture, second=False)


def convnextv2(c: Config, architecture: str | None) -> Network:
    """ConvNeXt V2."""
    return _next(c, architecture, second=True)


_DEFAULTS = {
    "num_channels": 3,
    "image_size": 224,
    "patch_size": 4,
    "hidden_sizes": [96, 192, 384, 768],
    "depths": [3, 3, 9, 3],
    "hidden_act": "gelu",
    "layer_scale_init_value": 1e-6,
    "drop_path_rate": 0.0,
}

FAMILIES = table(
    Family("convnext", convnext, _DEFAULTS, {}, "encoder", "eager", "measured rows"),
    Family("convnextv2", convnextv2, _DEFAULTS, {}, "encoder", "eager", "measured rows"),
)
