"""Rotary embedding by three positions of a token: in time, height and width (Qwen-VL's M-RoPE)."""

from __future__ import annotations

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.nn.layers.rotary import Rotation, spread
from memcalc.nn.module import Buffer, Module
from memcalc.tables.dtypes import FP32


class MultimodalRotary(Module):
    """cos and sin [b, s, d] in the dtype of the hidden states, from positions [3, b, s], or [1, s] in all three.

    Each angle is by one of the three: in sections one after another, copied together, or `interleaved`, written in
    place over those in time. With `pairs`, neighbouring elements share an angle (GLM-4V).
    """

    scope = "rotary embedding"

    def __init__(self, dim: int, *, interleaved: bool = False, pairs: bool = False) -> None:
        self.inv_freq = Buffer(dim // 2)
        self.original_inv_freq = Buffer(dim // 2)
        self.interleaved = interleaved
        self.pairs = pairs

    def forward(self, x: Tensor, position_ids: Tensor) -> Rotation:
        """The pair for `position_ids`; `x` gives its dtype and shape."""
        if len(position_ids.shape) == 2:
            position_ids = ops.expand(ops.unsqueeze(position_ids, 0), 3, *x.shape[:2])
        freqs = ops.mul(ops.to(ops.unsqueeze(position_ids, -1), FP32), self.inv_freq)
        cos = ops.mul_scalar(ops.cos(freqs))
        sin = ops.mul_scalar(ops.sin(freqs))
        sin = self._mixed(sin)
        cos = self._mixed(cos)
        return ops.to(cos, x.dtype), ops.to(sin, x.dtype)

    def _mixed(self, freqs: Tensor) -> Tensor:
        mixed = ops.select(freqs, 0)
        if not self.interleaved:
            mixed = ops.clone(mixed, contiguous=True)  # sections of the three, copied together
        return spread(mixed) if self.pairs else ops.cat((mixed, mixed), -1)
