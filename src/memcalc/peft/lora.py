"""LoRA: a frozen layer with two trained low-rank matrices.

Source of the order of operations: peft/tuners/lora/{layer.py,dora.py} of PEFT 0.21: the base layer's result, a cast of
the input to the adapter's dtype, A, B, scaling, the sum, and a cast back.
"""

from __future__ import annotations

from typing import Any

from memcalc import ops
from memcalc.autograd.graph import as_parameter
from memcalc.autograd.tensor import Tensor
from memcalc.nn.layers.linear import Conv1D, Embedding, Linear
from memcalc.nn.module import Module, Parameter
from memcalc.tables.dtypes import FP32, DType

GROUP = "LoRA adapters"
_BESIDE_QUANTIZED = ("bnb-4bit", "bnb-8bit", "awq")


def factor(inputs: int, outputs: int, dtype: DType, copies: int, *, bias: bool = False) -> Linear:
    """One of the two factors: a trained linear layer of its own dtype."""
    layer = Linear(inputs, outputs, bias=bias, group=GROUP)
    layer.copies = copies
    for _, parameter in layer.direct_tensors():
        _settle(parameter, dtype, copies)
    return layer


def _settle(parameter: Parameter, dtype: DType, copies: int) -> Parameter:
    parameter.fixed_dtype, parameter.copies = dtype, copies
    return parameter


class LoraLinear(Module):
    """A linear layer of `inputs` and `outputs` with an adapter of `rank`; `dora` trains its column norms as well."""

    def __init__(  # noqa: PLR0913 (PEFT's options of a layer)
        self,
        base: Module,
        inputs: int,
        outputs: int,
        rank: int,
        *,
        dtype: DType = FP32,
        dropout: float = 0.0,
        bias: bool = False,
        dora: bool = False,
    ) -> None:
        self.base_layer: Any = base
        self.copies = base.copies
        self.inputs = inputs
        self.dropout = dropout
        self.lora_A = factor(inputs, rank, dtype, base.copies)
        self.lora_B = factor(rank, outputs, dtype, base.copies, bias=bias)
        self.lora_magnitude_vector = _settle(Parameter(outputs, group=GROUP), dtype, base.copies) if dora else None

    @property
    def weight(self) -> Parameter:
        """The base layer's weight, for those who look at it directly."""
        weight: Parameter = self.base_layer.weight
        return weight

    @property
    def bias(self) -> Parameter | None:
        """The base layer's bias, for those who look at it directly."""
        bias: Parameter | None = self.base_layer.bias
        return bias

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] to [..., out]."""
        if self.kernel in _BESIDE_QUANTIZED:
            return self._beside_quantized(x)
        out = self.base_layer(x)
        dtype = out.dtype
        with x.tape.scoped(GROUP):
            x = ops.to(x, self.lora_A.weight.dtype)
            if self.lora_magnitude_vector is None:
                out = ops.add(out, ops.mul_scalar(self.lora_B(self.lora_A(ops.dropout(x, self.dropout)))))
            else:
                out = ops.add(out, self._weight_decomposed(x, out, self.lora_magnitude_vector))
            return ops.to(out, dtype)

    @property
    def kernel(self) -> str:
        """How the base layer multiplies with its quantized weight; empty where that is wide."""
        form = getattr(self.base_layer, "form", None)
        return "" if form is None else form.kernel

    def _beside_quantized(self, x: Tensor) -> Tensor:
        """The adapter of bitsandbytes' and AWQ's layers: its result is cast, not the sum; autocast casts its input."""
        out = self.base_layer(x)
        dtype = out.dtype
        with x.tape.scoped(GROUP):
            if self.kernel == "bnb-4bit":
                out = ops.clone(out)
            converts = x.tape.autocast is None
            if converts:
                x = ops.to(x, self.lora_A.weight.dtype)
            if self.lora_magnitude_vector is not None:
                out = ops.add(out, self._weight_decomposed(x, out, self.lora_magnitude_vector))
                return ops.to(out, dtype) if converts else out
            added = self.lora_B(self.lora_A(ops.dropout(x, self.dropout)))
            if self.kernel == "awq":
                added = ops.to(added, dtype) if converts else added
                added = ops.mul_scalar(added)
            else:
                added = ops.mul_scalar(added)
                added = ops.to(added, dtype) if converts else added
            return ops.add(out, added)

    def _weight_decomposed(self, x: Tensor, base_out: Tensor, magnitude: Tensor) -> Tensor:
        """What DoRA adds: the direction's share of both results, scaled by the trained norms over the present ones.

        The present norms are those of the whole matrix, so the adapter is multiplied out with an identity matrix.
        With dropout the base result is computed again, from the input that was dropped out.
        """
        dropped = ops.dropout(x, self.dropout)
        again = dropped is not x
        x = dropped
        del dropped
        identity = x.tape.empty((self.inputs, self.inputs), self.lora_A.weight.dtype)
        delta = ops.transpose(self.lora_B(self.lora_A(identity)), 0, 1)
        del identity
        delta = ops.to(delta, x.dtype)
        weight = ops.to(dense_weight(self.base_layer), x.dtype)
        norm = _norm_of_sum(weight, delta.detach(), by_columns=not isinstance(self.base_layer, Conv1D))
        scale = ops.view(ops.div(magnitude, norm), 1, -1)
        low = self.lora_B(self.lora_A(x))
        if again:
            base_out = ops.linear(x, _transposed(weight) if isinstance(self.base_layer, Conv1D) else weight)
        elif (bias := getattr(self.base_layer, "bias", None)) is not None:
            base_out = ops.sub(base_out, bias)
        return ops.add(ops.mul(ops.add_scalar(scale), base_out), ops.mul_scalar(ops.mul(scale, low)))


def dense_weight(base: Module) -> Tensor:
    """The weight of a base layer as a matrix; a quantized one is dequantized."""
    dequantize = getattr(base, "dequantize", None)
    weight: Tensor = getattr(base, "weight") if dequantize is None else dequantize()  # noqa: B009
    return weight


def _transposed(weight: Tensor) -> Tensor:
    """The transposed matrix, which PEFT makes a new parameter where it was one: that asks for a gradient, unlike it."""
    transposed = ops.transpose(weight, 0, 1)
    return as_parameter(transposed) if isinstance(weight, Parameter) else transposed


def _norm_of_sum(weight: Tensor, delta: Tensor, *, by_columns: bool) -> Tensor:
    """The norms of weight + delta over its inputs: one per output."""
    if not by_columns:
        weight = ops.transpose(weight, 0, 1)
    weight = ops.add(weight, ops.mul_scalar(delta))
    return weight.tape.empty((weight.shape[0],), weight.dtype)


class LoraEmbedding(Module):
    """An embedding with an adapter: rows of A, then B. Nothing is cast but the result. `dora` as in `LoraLinear`."""

    scope = "embedding"

    def __init__(self, base: Embedding, rank: int, *, dtype: DType = FP32, dora: bool = False) -> None:
        count, width = base.weight.shape
        self.base_layer = base
        self.copies = base.copies
        self.lora_embedding_A = _settle(Parameter(rank, count, group=GROUP), dtype, base.copies)
        self.lora_embedding_B = _settle(Parameter(width, rank, group=GROUP), dtype, base.copies)
        self.lora_magnitude_vector = _settle(Parameter(width, group=GROUP), dtype, base.copies) if dora else None

    def forward(self, ids: Tensor) -> Tensor:
        """Ids [...] to vectors [..., width]."""
        out = self.base_layer(ids)
        dtype = out.dtype
        first = ops.transpose(self.lora_embedding_A, 0, 1)
        second = ops.transpose(self.lora_embedding_B, 0, 1)
        if self.lora_magnitude_vector is not None:
            scale, added = self._weight_decomposed(ids, first, second, self.lora_magnitude_vector)
            out = ops.add(ops.mul(scale, out), self._scaled(added))
        else:
            rows = ops.embedding(ids, first)
            added = ops.mul_scalar(ops.matmul(rows, second))
            added = self._scaled(added)
            out = ops.add(out, added)
        return ops.to(out, dtype)

    def _scaled(self, added: Tensor) -> Tensor:
        """Times the number by which the base layer multiplies its vectors, if it does."""
        scale = getattr(self.base_layer, "embed_scale", None)
        return added if scale is None else ops.mul(added, ops.to(scale, added.dtype))

    def _weight_decomposed(
        self, ids: Tensor, first: Tensor, second: Tensor, magnitude: Tensor
    ) -> tuple[Tensor, Tensor]:
        """DoRA's factor of both results [width], and the adapter's share [..., width]."""
        delta = ops.transpose(ops.matmul(first, second), 0, 1)
        norm = _norm_of_sum(self.base_layer.weight, delta.detach(), by_columns=False)
        scale = ops.div(magnitude, norm)
        added = ops.mul_scalar(ops.mul(scale, ops.matmul(ops.embedding(ids, first), second)))
        return scale, added
