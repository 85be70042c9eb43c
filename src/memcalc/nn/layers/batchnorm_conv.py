"""Parts of convolutional networks: convolutions of images, BatchNorm, and attention over channels."""

from __future__ import annotations

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.errors import UsageError
from memcalc.nn.layers.mlp import activation
from memcalc.nn.module import Buffer, Module, Parameter
from memcalc.tables.dtypes import INT64


class Convolution2d(Module):
    """A convolution of images with a square weight [out, in / groups, width, width], padded by half of it."""

    scope = "convolutions"

    def __init__(
        self,
        inputs: int,
        outputs: int,
        width: int,
        stride: int,
        *,
        groups: int = 1,
        bias: bool = False,
        padding: int | None = None,
    ) -> None:
        self.weight = Parameter(outputs, inputs // groups, width, width, group="other")
        self.bias = Parameter(outputs, group="other") if bias else None
        self.stride, self.padding = stride, width // 2 if padding is None else padding

    def forward(self, x: Tensor) -> Tensor:
        """[b, in, height, width] to [b, out, height', width']. Raises UsageError where the image is too small."""
        if min(x.shape[2:]) + 2 * self.padding < self.weight.shape[2]:
            raise UsageError("the image is too small for the convolutions of this model; give a larger --image-size.")
        return ops.convolution(x, self.weight, self.bias, stride=self.stride, padding=self.padding)


class BatchNorm(Module):
    """A norm of each channel over the batch, and the statistics that it keeps of all batches."""

    def __init__(self, channels: int) -> None:
        self.weight = Parameter(channels, group="norms")
        self.bias = Parameter(channels, group="norms")
        self.running_mean = Buffer(channels, dtype=None)
        self.running_var = Buffer(channels, dtype=None)
        self.num_batches_tracked = Buffer(dtype=INT64)

    def forward(self, x: Tensor) -> Tensor:
        """[b, c, height, width] to the same."""
        return ops.batch_norm(x, self.weight, self.bias, (self.running_mean, self.running_var))


class ConvLayer(Module):
    """act(BatchNorm(convolution)); without an activation where `act` is None."""

    scope = "convolutions"

    def __init__(self, inputs: int, outputs: int, width: int, stride: int, act: str | None, *, groups: int = 1) -> None:
        self.convolution = Convolution2d(inputs, outputs, width, stride, groups=groups)
        self.normalization = BatchNorm(outputs)
        self.act = None if act is None else activation(act)

    def forward(self, hidden: Tensor) -> Tensor:
        """[b, in, height, width] to [b, out, height', width']."""
        hidden = self.convolution(hidden)
        hidden = self.normalization(hidden)
        return hidden if self.act is None else self.act(hidden)


def mean_of_places(states: Tensor) -> Tensor:
    """The mean of an image's places [b, c, 1, 1]."""
    flat = ops.view(states, *states.shape[:2], -1)
    return ops.unsqueeze(ops.mean(flat), -1)


class SqueezeExcitation(Module):
    """Every channel times a number between 0 and 1 that the means of all channels decide."""

    scope = "convolutions"

    def __init__(self, channels: int, narrow: int) -> None:
        self.narrow = Convolution2d(channels, narrow, 1, 1, bias=True)
        self.wide = Convolution2d(narrow, channels, 1, 1, bias=True)

    def forward(self, hidden: Tensor) -> Tensor:
        """[b, c, height, width] to the same."""
        pooled = mean_of_places(hidden)
        factors = ops.sigmoid(self.wide(ops.relu(self.narrow(pooled))))
        return ops.mul(hidden, factors)
