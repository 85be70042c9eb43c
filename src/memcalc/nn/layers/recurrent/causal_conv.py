"""The short causal convolution of state-space layers, over a sequence or over one token and a cached state."""

from __future__ import annotations

from collections.abc import Callable

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.nn.module import Module, Parameter
from memcalc.nn.run_context import run_context

Activation = Callable[[Tensor], Tensor]

STATE = "convolution states"


class CausalConv(Module):
    """A depthwise convolution of `width` steps over [b, channels, s] (torch.nn.Conv1d), and an activation."""

    def __init__(self, channels: int, width: int, act: Activation | None, *, bias: bool = True) -> None:
        self.weight = Parameter(channels, 1, width, group="state-space mixer")
        self.bias = Parameter(channels, group="state-space mixer") if bias else None
        self.act = act

    def remembered(self, x: Tensor, owner: object) -> Tensor:
        """x [b, channels, s] after what the cache of `owner` holds, or after padding; the last inputs are kept there.

        A single token is left to the state itself. What comes back takes the place of x.
        """
        cache, length = run_context(x).cache, x.shape[-1]
        if cache is None:
            return x
        channels, _, width = self.weight.shape
        seen = cache.has_state(owner, STATE)
        state = cache.state(owner, (x.shape[0], channels, width), x.dtype, x, STATE)
        if seen and length > 1:
            return ops.cat((state, x), -1)
        if not seen and length < width:
            return ops.pad(x, -1, width - length)
        return x

    def __call__(self, x: Tensor, owner: object, length: int) -> Tensor:
        """What `remembered` gave, [b, channels, ...], to the last `length` of it."""
        cache = run_context(x).cache
        weight = ops.squeeze(self.weight, 1)
        if cache is None:
            return self._over_sequence(x, weight)
        if x.shape[-1] == 1:
            return self._over_token(x, cache.get_state(owner, STATE), weight)
        return ops.narrow(self._over_sequence(x, weight), -1, length)

    def _over_sequence(self, x: Tensor, weight: Tensor) -> Tensor:
        padding = weight.shape[-1] - 1
        out = ops.conv1d(ops.to(x, weight.dtype), ops.unsqueeze(weight, 1), self.bias, padding)
        out = ops.narrow(out, -1, x.shape[-1])
        if self.act is not None:
            out = self.act(out)
        return ops.to(out, x.dtype)

    def _over_token(self, x: Tensor, state: Tensor, weight: Tensor) -> Tensor:
        joined = ops.to(ops.cat([state, x], -1), weight.dtype)
        out = ops.conv1d(joined, ops.unsqueeze(weight, 1), self.bias, 0)
        out = ops.narrow(out, -1, x.shape[-1])
        if self.act is not None:
            out = self.act(out)
        return ops.to(out, x.dtype)
