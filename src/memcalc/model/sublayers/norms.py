"""Normalizations, as Transformers writes them in eager PyTorch and as PyTorch fuses them."""

from __future__ import annotations

from memcalc.model import ops
from memcalc.model.module import Module, Parameter
from memcalc.model.tensor import Tensor
from memcalc.tables.dtypes import FP32


class RMSNorm(Module):
    """Llama's RMSNorm: keeps an fp32 copy of the input, the reciprocal root, and the normalised tensor."""

    scope = "norms"

    def __init__(self, width: int) -> None:
        self.weight = Parameter(width, group="norms")

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., width] to [..., width]."""
        dtype = hidden.dtype
        hidden = ops.to(hidden, FP32)
        variance = ops.mean(ops.power(hidden))
        hidden = ops.multiply(hidden, ops.rsqrt(ops.shift(variance)))
        return ops.multiply(self.weight, ops.to(hidden, dtype))


class LayerNorm(Module):
    """torch.nn.LayerNorm over the last dimension: keeps its input, mean and reciprocal deviation."""

    scope = "norms"

    def __init__(self, width: int, *, bias: bool = True, affine: bool = True) -> None:
        self.weight = Parameter(width, group="norms") if affine else None
        self.bias = Parameter(width, group="norms") if affine and bias else None

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., width] to [..., width]."""
        return ops.layer_norm(hidden, self.weight, self.bias)
