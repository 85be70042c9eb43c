"""Linear layers and experts whose weights are quantized: exact stored bytes, and the temporaries of their library."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

from memcalc.autograd.tensor import Tensor
from memcalc.common.sizes import Shape
from memcalc.errors import ConfigError, UsageError
from memcalc.nn.layers.linear import Conv1D, Linear
from memcalc.nn.layers.mixture_of_experts import Experts
from memcalc.nn.module import QUANTIZATION_CONSTANTS, Buffer, Module, Parameter
from memcalc.nn.module_paths import output_head, sites
from memcalc.nn.stack import Stack
from memcalc.ops import quantized as kernels
from memcalc.ops.elementwise import add_, to
from memcalc.tables.dtypes import FP16, FP32, UINT8, DType
from memcalc.tables.weight_formats import WeightFormat

_WIDE = ("head", "embedding")


class Packed(Parameter):
    """A quantized weight of shape `matrix`, [out, in] or a stack of such, as bytes."""

    __slots__ = ("matrix",)

    def __init__(self, nbytes: int, matrix: Shape, form: WeightFormat, like: Parameter) -> None:
        super().__init__(nbytes, dtype=DType(form.name, 1, UINT8.rank, False), group=like.group)
        self.matrix = matrix
        self.trainable = False
        self.copies = like.copies

    @property
    def count(self) -> int:
        """How many weights it stands for."""
        return prod(self.matrix)


def _pack(module: Module, name: str, form: WeightFormat, matrix: Shape, like: Parameter) -> None:
    """Put the tensors of a quantized weight on `module`, the weight itself under `name`."""
    for part, nbytes in form.tensors(matrix).items():
        if part == "weights":
            setattr(module, name, Packed(nbytes, matrix, form, like))
            continue
        constant = Buffer(nbytes, dtype=UINT8, group=QUANTIZATION_CONSTANTS)
        constant.copies = like.copies
        setattr(module, f"{name}_{part.replace(' ', '_')}", constant)


class QuantizedLinear(Linear):
    """A linear layer of `form`, made from a wide one. `compute` is the 16-bit dtype that it multiplies in.

    `stored` is the dtype that the weight was quantized from.
    """

    def __init__(self, layer: Linear | Conv1D, form: WeightFormat, compute: DType) -> None:
        transposed = isinstance(layer, Conv1D)
        rows, columns = layer.weight.shape
        self.shape: Shape = (columns, rows) if transposed else (rows, columns)
        self.form = form
        self.compute = compute
        self.copies = layer.copies
        _pack(self, "weight", form, self.shape, layer.weight)
        self.bias = layer.bias

    @property
    def inputs(self) -> int:
        """Width of the input."""
        return self.shape[1]

    @property
    def outputs(self) -> int:
        """Width of the output."""
        return self.shape[0]

    @property
    def nested(self) -> bool:
        """Whether the scales are quantized themselves."""
        return len(self.form.shared) > 1

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] to [..., out]. bitsandbytes adds a bias in its kernels; LLM.int8 keeps it in its input's dtype."""
        dtype = x.dtype
        if self.bias is not None and self.form.kernel == "bnb-8bit":
            self.bias.dtype = dtype
        match self.form.kernel:
            case "bnb-4bit":
                x = to(x, self.compute)
                return to(kernels.linear_4bit(x, self.shape, self.compute, nested=self.nested), dtype)
            case "bnb-8bit":
                return kernels.linear_8bit(x, self.shape)
            case "gptq":
                return self._biased(kernels.linear_gptq(x, self.shape[::-1]))
            case "awq":
                x = to(x, FP16 if dtype is FP32 else dtype)
                return to(self._biased(kernels.linear_awq(x, self.shape[::-1])), dtype)
            case "gguf":
                return self._biased(kernels.linear_gguf(x, self.shape, self.form.name))
            case "fp8":
                return self._biased(kernels.linear_fp8(x, self.shape))
            case _:
                return self._biased(kernels.linear_dequantized(x, self.shape))

    def _biased(self, out: Tensor) -> Tensor:
        return out if self.bias is None else add_(out, to(self.bias, out.dtype))

    def dequantize(self) -> Tensor:
        """The weight as a matrix, for those who look at it (DoRA)."""
        tape = self.weight.tape
        if self.form.kernel == "bnb-8bit":
            return kernels.dequantize_8bit(tape, self.shape, self.compute)
        return kernels.dequantize_4bit(tape, self.shape, self.compute, nested=self.nested)


class QuantizedExperts(Experts):
    """The experts of a mixture in `form`."""

    def __init__(self, experts: Experts, form: WeightFormat) -> None:
        vars(self).update(vars(experts))
        self.form = form
        for name in ("up_proj", "down_proj"):
            weight: Parameter = getattr(experts, name)
            *stack, rows, columns = weight.shape
            matrix = (*stack, columns, rows) if experts.transposed else (*stack, rows, columns)
            _pack(self, name, form, matrix, weight)

    def _grouped(self, rows: Tensor, weight: Tensor, offsets: Tensor, bias: Tensor | None) -> Tensor:
        assert isinstance(weight, Packed)
        out = kernels.grouped(
            rows, weight.matrix, offsets, fused=self.form.kernel == "fp8", apart=self.form.experts_apart
        )
        return out if bias is None else add_(out, bias)


ModuleFormat = Callable[[str], WeightFormat | None]
"""The format of a module by its dotted name; None where it stays wide."""


def tell_apart(network: Module, format_of: ModuleFormat) -> None:
    """Split stacks whose blocks are not all quantized alike; call it before anything else is done to the blocks."""
    for path, stack in network.modules():
        if isinstance(stack, Stack) and not stack.shared:
            marks = [
                tuple(
                    _name_of(format_of(f"{path}.{position}.{name}"))
                    for name, module in block.modules()
                    if isinstance(module, (Linear, Conv1D, Experts))
                )
                for position, block in stack.positions
            ]
            stack.split(marks)


def _name_of(form: WeightFormat | None) -> str | None:
    return None if form is None else form.name


def quantize(
    network: Module, form: WeightFormat, compute: DType, format_of: ModuleFormat | None = None, stated: str = ""
) -> None:
    """Put every linear layer of `network` into `form`, or into what `format_of` says; its head where the form says so.

    Raises UsageError where there is none; ConfigError where the config says so, under the key `stated`.
    """
    found = sites(network)
    head = output_head(found)
    quantized = False
    for site in found:
        own = form if format_of is None else format_of(site.name)
        if own is None or (site.module is head and not own.head) or not is_quantizable(site.module, own):
            continue
        quantized = True
        layer = site.module
        if isinstance(layer, Experts):
            site.replace(QuantizedExperts(layer, own))
            continue
        assert isinstance(layer, (Linear, Conv1D))
        if layer.bias is not None and own.kernel == "bnb-4bit":
            layer.bias.fixed_dtype = compute
        site.replace(QuantizedLinear(layer, own, compute))
    if not quantized:
        what = "stacked experts" if form.only_experts else "linear layers"
        if stated:
            raise ConfigError(
                f"config.json says in '{stated}' that the weights are {form.name}, which is for {what}, of which this "
                "model has none to quantize; correct it."
            )
        raise UsageError(f"--quantization {form.name} quantizes {what}, of which this model has none; leave it out.")


def is_quantizable(module: Module, form: WeightFormat) -> bool:
    """Whether the weights of a module are put into `form`; see `quantize` for the head of a language model."""
    if isinstance(module, Experts):
        return form.experts
    return not form.only_experts and isinstance(module, (Linear, Conv1D)) and module.weight.group not in _WIDE
