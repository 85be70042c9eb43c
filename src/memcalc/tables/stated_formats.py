"""How the quantized weights of a repository lie in memory, from what its config states. One row a method."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from memcalc.common.escaping import quoted
from memcalc.config.quantization import Quantization
from memcalc.config.quantized_modules import quantized_modules, quantizes_head
from memcalc.errors import ConfigError
from memcalc.tables.weight_formats import FORMATS, WeightFormat

ModuleFormat = Callable[[str], WeightFormat | None]
"""The format of a module's weight by the module's name; None where it stays wide."""

_OWN = "the repository's own config"


def stated_format(stated: Quantization) -> WeightFormat | None:
    """The format of a repository that states its quantization; None where the layout of its method is not known."""
    row = _STATED.get(stated.method)
    form = None if row is None else row(stated)
    return replace(form, head=True) if form is not None and quantizes_head(stated) else form


def unknown_layout(stated: Quantization) -> ConfigError:
    """The error for a config whose quantization has no row here, where no weights tell what it takes."""
    return ConfigError(
        f"config.json names the quantization {quoted(stated.method)} in '{stated.where}', whose layout memcalc does "
        f"not know; give the model's folder with its weights, whose headers tell, or remove '{stated.where}'."
    )


def module_formats(stated: Quantization | None, form: WeightFormat) -> ModuleFormat:
    """The format of each module: `form` for all where the repository states nothing, else what its lists say.

    Raises ConfigError where one of its lists holds a pattern that is none.
    """
    if stated is None:
        return lambda name: form
    quantization_of = quantized_modules(stated)
    formats: dict[int, WeightFormat | None] = {id(stated): form}

    def of(name: str) -> WeightFormat | None:
        found = quantization_of(name)
        if found is None:
            return None
        if id(found) not in formats:
            formats[id(found)] = stated_format(found)
        return formats[id(found)]

    return of


def _bitsandbytes(stated: Quantization) -> WeightFormat:
    if stated.bits == 8:
        return FORMATS["int8"]
    kind = stated.settings.get("bnb_4bit_quant_type", "fp4")
    double = bool(stated.settings.get("bnb_4bit_use_double_quant"))
    return FORMATS["nf4-double" if double else "nf4" if kind == "nf4" else "fp4"]


def _blocks(stated: Quantization) -> WeightFormat:
    """One scale for a whole matrix where no size of a block is stated."""
    if stated.settings.get("weight_block_size"):
        return FORMATS["fp8"]
    return WeightFormat(name="fp8", bits=8, kernel="fp8", source="Transformers integrations: a scale per matrix")


def _integers(
    scale: int, *, zero: bool = False, group: int | None = None, input_bits: int = 0, kernel: str = "dequantize"
) -> Callable[[Quantization], WeightFormat]:
    """Integers with a scale of so many bits for each group, or for each row, and a zero as wide as a weight."""

    def row(stated: Quantization) -> WeightFormat:
        bits, size = stated.bits or 4, stated.group_size or group
        constants = scale + (bits if zero else 0)
        return _grouped(str(stated), bits, size, constants, input_bits=input_bits, kernel=kernel)

    return row


def _grouped(
    name: str, bits: int, size: int | None, constants: int, *, input_bits: int = 0, kernel: str = "dequantize"
) -> WeightFormat:
    return WeightFormat(
        name=name,
        bits=bits,
        shared=((size, constants),) if size else (),
        row_bits=0 if size else constants,
        input_bits=input_bits,
        kernel=kernel,
        source=_OWN,
    )


def _compressed(stated: Quantization) -> WeightFormat:
    """compressed-tensors: integers or floats, with a scale for a group, a row, a block or a whole matrix."""
    weights = _first_weights(stated.settings)
    bits, size = stated.bits or 4, stated.group_size
    floats, strategy = weights.get("type") == "float", str(weights.get("strategy") or "")
    if floats and bits == 4:
        return _grouped(str(stated), 4, size or 16, 8)
    if strategy == "block" or weights.get("block_structure"):
        return WeightFormat(name=str(stated), bits=bits, block_bits=16, source=_OWN)
    if strategy == "tensor" or (floats and not strategy):
        return WeightFormat(name=str(stated), bits=bits, source=_OWN)
    zero = bits if weights.get("symmetric") is False else 0
    return _grouped(str(stated), bits, size, 16 + zero)


_ALGORITHMS: Mapping[str, tuple[int, int | None, int, int]] = {
    # NVIDIA ModelOpt's quant_algo: bits, weights that share a scale (0: a row, None: the matrix), its bits, those of
    # a block's. Source: modelopt/torch/export/quant_utils.py and vLLM's modelopt.py.
    "FP8": (8, None, 0, 0),
    "FP8_PER_CHANNEL_PER_TOKEN": (8, 0, 32, 0),
    "FP8_PB_WO": (8, None, 0, 32),
    "FP8_PB_REAL": (8, None, 0, 32),
    "NVFP4": (4, 16, 8, 0),
    "NVFP4_AWQ": (4, 16, 8, 0),
    "NVFP4_SVDQUANT": (4, 16, 8, 0),
    "W4A16_NVFP4": (4, 16, 8, 0),
    "W4A16_AWQ": (4, 128, 16, 0),
    "INT4_AWQ": (4, 128, 16, 0),
    "W4A8_AWQ": (4, 128, 16, 0),
    "W8A16": (8, 0, 32, 0),
    "W8A8_SQ_PER_CHANNEL": (8, 0, 32, 0),
    "INT8_SQ": (8, 0, 32, 0),
    "MXFP8": (8, 32, 8, 0),
    "MXFP4": (4, 32, 8, 0),
    "W4A8_MXFP4_FP8": (4, 32, 8, 0),
}


def _modelopt(stated: Quantization) -> WeightFormat | None:
    algorithm = str(stated.settings.get("quant_algo") or "").upper()
    mixed = stated.settings.get("quantized_layers")
    if algorithm not in _ALGORITHMS and isinstance(mixed, Mapping) and mixed:
        first = next(iter(mixed.values()))
        return _modelopt(replace(stated, settings=first)) if isinstance(first, Mapping) else None
    if algorithm not in _ALGORITHMS:
        return _compressed(stated) if stated.bits else None
    bits, size, constants, block = _ALGORITHMS[algorithm]
    name = f"{stated.method} {algorithm}"
    if size is None:
        return WeightFormat(name=name, bits=bits, block_bits=block, source=_OWN)
    return _grouped(name, bits, (stated.group_size or size) if size else None, constants)


def _quark(stated: Quantization) -> WeightFormat | None:
    """AMD Quark: the dtype and the group of `global_quant_config.weight`."""
    whole = stated.settings.get("global_quant_config")
    weight = whole.get("weight") if isinstance(whole, Mapping) else None
    if not isinstance(weight, Mapping):
        return None
    dtype, size = str(weight.get("dtype") or ""), weight.get("group_size")
    bits = next((bits for bits in (4, 6, 8) if f"int{bits}" in dtype or f"fp{bits}" in dtype), None)
    if bits is None:
        return None
    name, group = f"quark {dtype}", size if type(size) is int and size > 0 else None
    if weight.get("qscheme") == "per_tensor":
        return WeightFormat(name=name, bits=bits, source=_OWN)
    return _grouped(name, bits, group, 8 if "fp4" in dtype or "fp6" in dtype else 16)


def _first_weights(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    groups = settings.get("config_groups")
    for group in groups.values() if isinstance(groups, Mapping) else ():
        if isinstance(group, Mapping) and isinstance(weights := group.get("weights"), Mapping):
            return weights
    return {}


_STATED: Mapping[str, Callable[[Quantization], WeightFormat | None]] = {
    "bitsandbytes": _bitsandbytes,
    "gptq": _integers(16, zero=True, input_bits=32, kernel="gptq"),
    "auto-round": _integers(16, zero=True, group=128),
    "awq": _integers(16, zero=True, group=128, kernel="awq"),
    "fp8": _blocks,
    "fbgemm-fp8": _integers(32),
    "mxfp4": lambda _: FORMATS["mxfp4"],
    "compressed-tensors": _compressed,
    "modelopt": _modelopt,
    "quark": _quark,
    "mlx": _integers(32, group=64),
    "hqq": _integers(32, group=64),
    "quanto": _integers(16),
    "torchao": _integers(32),
    "eetq": _integers(16),
    "bitnet": _integers(16),
}
"""Methods that configs name, and how wide their libraries keep the scale of a group."""
