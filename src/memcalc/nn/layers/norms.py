"""Normalizations, as Transformers writes them in eager PyTorch and as PyTorch fuses them."""

from __future__ import annotations

from typing import Any, Literal

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.nn.module import Module, Parameter
from memcalc.tables.dtypes import FP32


class FusableNorm(Module):
    """An RMSNorm with a weight, which a kernel may compute at once."""

    scope = "norms"
    kernel: Literal["eager", "in place", "new"] = "eager"
    """Eager PyTorch, or Liger's kernel, whose gradient is written over the incoming one, or is new."""
    weight: Parameter

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """[..., width] to [..., width]."""
        if self.kernel == "eager":
            return super().__call__(x, *args, **kwargs)
        with x.tape.scoped("norms"):
            return ops.liger_rms_norm(x, self.weight, in_place=self.kernel == "in place")


class RMSNorm(FusableNorm):
    """Llama's RMSNorm: keeps an fp32 copy of the input, the reciprocal root, and the normalised tensor.

    `scale_in` says in which dtype the weight multiplies: cast: the input's, after casting back (Llama); mixed: the
    weight's own times fp32 (OLMo 2); fp32: a cast copy of the weight (Helium); input: as cast, but the input itself is
    divided and not its fp32 copy, and cast to the weight's dtype (T5). Without a weight, only the division.
    """

    def __init__(self, width: int, *, scale_in: Literal["cast", "mixed", "fp32", "input"] = "cast") -> None:
        self.weight = Parameter(width, group="norms")
        self.scale_in = scale_in

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., width] to [..., width]."""
        if self.scale_in == "input":
            variance = ops.mean(ops.pow(ops.to(hidden, FP32)))
            hidden = ops.mul(hidden, ops.rsqrt(ops.add_scalar(variance)))
            hidden = ops.to(hidden, self.weight.dtype)
            return ops.mul(self.weight, hidden)
        dtype = hidden.dtype
        hidden = ops.to(hidden, FP32)
        variance = ops.mean(ops.pow(hidden))
        hidden = ops.mul(hidden, ops.rsqrt(ops.add_scalar(variance)))
        if self.scale_in == "cast":
            return ops.mul(self.weight, ops.to(hidden, dtype))
        if self.scale_in == "mixed":
            return ops.to(ops.mul(self.weight, hidden), dtype)
        return ops.to(ops.mul(ops.to(self.weight, FP32), hidden), dtype)


class PlainRMSNorm(Module):
    """RMSNorm without a weight, in fp32 and cast back (nanochat)."""

    scope = "norms"

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] to [..., width]."""
        return ops.to(_divided(ops.to(x, FP32)), x.dtype)


class GemmaRMSNorm(FusableNorm):
    """Gemma's RMSNorm: all in fp32, with a weight that is added to one."""

    def __init__(self, width: int) -> None:
        self.weight = Parameter(width, group="norms")

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] to [..., width]."""
        out = _divided(ops.to(x, FP32))
        out = ops.mul(out, ops.add_scalar(ops.to(self.weight, FP32)))
        return ops.to(out, x.dtype)


def _divided(x: Tensor) -> Tensor:
    """x over its root mean square, in one expression."""
    return ops.mul(x, ops.rsqrt(ops.add_scalar(ops.mean(ops.pow(x)))))


class LayerNorm(Module):
    """torch.nn.LayerNorm over the last dimension: keeps its input, mean and reciprocal deviation."""

    scope = "norms"

    def __init__(self, width: int, *, bias: bool = True, affine: bool = True) -> None:
        self.weight = Parameter(width, group="norms") if affine else None
        self.bias = Parameter(width, group="norms") if affine and bias else None

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., width] to [..., width]."""
        return ops.layer_norm(hidden, self.weight, self.bias)


class PlainLayerNorm(Module):
    """LayerNorm without weight and bias, in fp32 and cast back (OLMo)."""

    scope = "norms"

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., width] to [..., width]."""
        return ops.to(ops.layer_norm(ops.to(hidden, FP32), None, None), hidden.dtype)


class EagerLayerNorm(Module):
    """Cohere's LayerNorm without bias, written out in fp32; the weight may have several dimensions."""

    scope = "norms"

    def __init__(self, *shape: int) -> None:
        self.weight = Parameter(*shape, group="norms")

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., *shape] to [..., *shape]."""
        dtype = hidden.dtype
        hidden = ops.to(hidden, FP32)
        mean = ops.mean(hidden)
        variance = ops.mean(ops.pow(ops.sub(hidden, mean)))
        hidden = ops.mul(ops.sub(hidden, mean), ops.rsqrt(ops.add_scalar(variance)))
        hidden = ops.mul(ops.to(self.weight, FP32), hidden)
        return ops.to(hidden, dtype)


class ShiftedLayerNorm(Module):
    """Nemotron's LayerNorm, whose weight is added to one; under autocast all of it is in the 16-bit dtype."""

    scope = "norms"

    def __init__(self, width: int) -> None:
        self.weight = Parameter(width, group="norms")
        self.bias = Parameter(width, group="norms")

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., width] to [..., width]."""
        tape = hidden.tape
        weight: Tensor = ops.add_scalar(self.weight)
        bias: Tensor = self.bias
        if tape.autocast is not None:
            dtype = tape.autocast
            hidden, weight, bias = ops.to(hidden, dtype), ops.to(weight, dtype), ops.to(bias, dtype)
        with tape.autocasting(None):
            return ops.layer_norm(hidden, weight, bias)


class LayerNormPerHead(Module):
    """StableLM's: for each head of [b, heads, s, dim] a LayerNorm of its own, without bias."""

    scope = "norms"

    def __init__(self, heads: int, dim: int) -> None:
        self.norms = [LayerNorm(dim, bias=False) for _ in range(heads)]

    def forward(self, hidden: Tensor) -> Tensor:
        """[b, heads, s, dim] to [b, heads, s, dim]."""
        pieces = ops.split(hidden, [1] * len(self.norms), 1)
        return ops.cat([norm(piece) for norm, piece in zip(self.norms, pieces, strict=True)], 1)
