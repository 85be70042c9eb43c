"""Norms of denoisers and autoencoders: diffusers' own, and those that a conditioning scales and shifts.

Source: diffusers 0.42.1, models/normalization.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.nn.layers.linear import Linear
from memcalc.nn.layers.norms import LayerNorm
from memcalc.nn.module import Module, Parameter
from memcalc.tables.dtypes import BF16, FP16, FP32


class AdaLayerNormZero(Module):
    """LayerNorm scaled and shifted by the conditioning, which gives gates too: `parts` chunks (6; 3 for one stream)."""

    scope = "norms"

    def __init__(self, width: int, parts: int = 6) -> None:
        self.linear = Linear(width, parts * width, bias=True)
        self.norm = LayerNorm(width, affine=False)
        self.parts = parts

    def forward(self, x: Tensor, emb: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
        """x [b, s, h] modulated, and the chunks [b, h] after shift and scale."""
        emb = self.linear(ops.silu(emb))
        shift, scale, *rest = ops.chunk(emb, self.parts, 1)
        x = ops.add(ops.mul(self.norm(x), ops.add_scalar(ops.unsqueeze(scale, 1))), ops.unsqueeze(shift, 1))
        return x, rest


class AdaLayerNormContinuous(Module):
    """LayerNorm scaled and shifted by the conditioning alone."""

    scope = "norms"

    def __init__(self, width: int, conditioning: int, *, bias: bool = True) -> None:
        self.linear = Linear(conditioning, 2 * width, bias=bias)
        self.norm = LayerNorm(width, affine=False)

    def forward(self, x: Tensor, emb: Tensor) -> Tensor:
        """x [b, s, h] modulated."""
        emb = self.linear(ops.to(ops.silu(emb), x.dtype))
        scale, shift = ops.chunk(emb, 2, 1)
        return ops.add(ops.mul(self.norm(x), ops.unsqueeze(ops.add_scalar(scale), 1)), ops.unsqueeze(shift, 1))


class FP32LayerNorm(Module):
    """LayerNorm of an fp32 copy, cast back."""

    scope = "norms"

    def __init__(self, width: int, *, affine: bool = False) -> None:
        self.weight = Parameter(width, group="norms") if affine else None
        self.bias = Parameter(width, group="norms") if affine else None

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] to the same."""
        weight = None if self.weight is None else ops.to(self.weight, FP32)
        bias = None if self.bias is None else ops.to(self.bias, FP32)
        return ops.to(ops.layer_norm(ops.to(x, FP32), weight, bias), x.dtype)


class RMSNorm(Module):
    """torch.nn.RMSNorm, computed by one kernel."""

    scope = "norms"

    def __init__(self, width: int) -> None:
        self.weight = Parameter(width, group="norms")

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] to [..., width]."""
        return ops.rms_norm(x, self.weight)


class EagerRMSNorm(Module):
    """diffusers' own RMSNorm: an fp32 copy for the mean of squares, the input itself divided."""

    scope = "norms"

    def __init__(self, width: int, *, bias: bool = False) -> None:
        self.weight = Parameter(width, group="norms")
        self.bias = Parameter(width, group="norms") if bias else None

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., width] to [..., width]."""
        variance = ops.mean(ops.pow(ops.to(hidden, FP32)))
        hidden = ops.mul(hidden, ops.rsqrt(ops.add_scalar(variance)))
        if self.weight.dtype in (FP16, BF16):
            hidden = ops.to(hidden, self.weight.dtype)
        hidden = ops.mul(hidden, self.weight)
        return hidden if self.bias is None else ops.add(hidden, self.bias)


class BareRMSNorm(Module):
    """diffusers' own RMSNorm without a weight."""

    scope = "norms"

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., width] to the same."""
        dtype = hidden.dtype
        variance = ops.mean(ops.pow(ops.to(hidden, FP32)))
        hidden = ops.mul(hidden, ops.rsqrt(ops.add_scalar(variance)))
        return ops.to(hidden, dtype)
