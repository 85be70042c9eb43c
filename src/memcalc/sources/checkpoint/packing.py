"""How quantized weights lie in a checkpoint: which tensors are packed weights, which are only their constants.

One row of `PACKINGS` is one way of storing. A packed tensor is told by its name and by the siblings in the same module;
how many parameters it stands for comes from shapes where they suffice, and from the stated bits where not.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from math import prod

from memcalc.config.quantization import weight_layouts
from memcalc.sources.checkpoint.module_tensors import ModuleTensors
from memcalc.sources.checkpoint.safetensors import BITS, HeaderTensor

# A weight's shape, or only its number of elements where the shape is not in the header.
Logical = tuple[int, ...] | int
Unpack = Callable[[ModuleTensors, HeaderTensor, str], Logical]


@dataclass(frozen=True)
class Packing:
    """In names, `*` stands for the weight's own name in its module (`weight`, `gate_up_proj`)."""

    label: str
    packed: str
    proof: tuple[str, ...]
    constants: tuple[str, ...]
    dtypes: frozenset[str]
    unpack: Unpack
    methods: frozenset[str] = frozenset()


def _words(tensor: HeaderTensor, bits: int | None) -> int:
    """Elements of `bits` in the tensor's stored bits: 32/3 of three bits fill a 32-bit word, so round at the end."""
    return round(Fraction(tensor.nbytes * 8, bits or 8))


def _gptq_or_awq(module: ModuleTensors, tensor: HeaderTensor, stem: str) -> Logical:
    """GPTQ packs the rows of (in, out), AWQ its columns; the scales are (groups, out) in both."""
    scales, order, zeros = module.leaf("scales"), module.leaf("g_idx"), module.leaf("qzeros")
    if len(tensor.shape) != 2 or scales is None or len(scales.shape) != 2:
        return _words(tensor, module.bits)
    out = scales.shape[1]
    if tensor.shape[1] == out:
        if order is not None and prod(order.shape) > 0:
            return (out, prod(order.shape))
        bits = Fraction(32 * zeros.shape[-1], out) if zeros is not None and zeros.shape and out else None
        per_word = 32 / bits if bits else Fraction(32, module.bits or 4)
        return (out, round(tensor.shape[0] * per_word))
    if tensor.shape[0] == scales.shape[0]:
        return (tensor.shape[0], _words(tensor, module.bits or 4) // max(tensor.shape[0], 1))
    return (out, tensor.shape[0])


def _compressed(module: ModuleTensors, tensor: HeaderTensor, stem: str) -> Logical:
    """`weight_packed`: int32 words along the last axis (the last word of a row may be padded), or two FP4 in a byte."""
    if module.leaf("meta") is not None:  # 2:4 sparse Marlin keeps half of the 4-bit weights
        return 2 * _words(tensor, module.bits or 4)
    if BITS.get(tensor.dtype) == 8:
        return (*tensor.shape[:-1], tensor.shape[-1] * 2)
    order, scale = module.leaf("weight_g_idx"), module.leaf("weight_scale")
    if order is not None and prod(order.shape) > 0:
        return (*tensor.shape[:-1], prod(order.shape))
    layouts = weight_layouts(module.settings) or [(module.bits or 4, module.group_size)]
    for bits, group in layouts:
        columns = scale.shape[-1] * group if scale is not None and scale.shape and group else 0
        if columns and tensor.shape[-1] in (-(-columns * bits // 32), -(-columns // (32 // bits))):
            return (*tensor.shape[:-1], columns)
    return (*tensor.shape[:-1], tensor.shape[-1] * 32 // layouts[0][0])


def _twice_as_wide(module: ModuleTensors, tensor: HeaderTensor, stem: str) -> Logical:
    return (*tensor.shape[:-1], tensor.shape[-1] * 2) if tensor.shape else 1


def _mxfp4(module: ModuleTensors, tensor: HeaderTensor, stem: str) -> Logical:
    """`*_blocks`: (experts, out, groups, 16 bytes of two weights)."""
    return (*tensor.shape[:-2], prod(tensor.shape[-2:]) * 2)


def _two_per_byte(module: ModuleTensors, tensor: HeaderTensor, stem: str) -> Logical:
    """bitsandbytes flattens the weight into whatever `bnb_4bit_quant_storage` says; only bytes count."""
    return tensor.nbytes * 2


def _as_stored(module: ModuleTensors, tensor: HeaderTensor, stem: str) -> Logical:
    return tensor.shape


def _bytes_with_scales(module: ModuleTensors, tensor: HeaderTensor, stem: str) -> Logical:
    """One 8-bit weight a byte, or a pair of FP4: then one byte-sized scale stands for 16 or 32 weights of the row.

    DeepSeek-V4 and Quark store FP4 so, as I8 or U8, beside FP8 matrices with the same names.
    """
    scale = module.leaf(f"{stem}_scale") or module.leaf("scale") or module.leaf(f"{stem}_scale_inv")
    if tensor.dtype in _BYTES and scale is not None and scale.shape and BITS.get(scale.dtype) == 8:
        pairs = tensor.shape[-1:] in ((scale.shape[-1] * 16,), (scale.shape[-1] * 8,))
        return _twice_as_wide(module, tensor, stem) if pairs else tensor.shape
    return tensor.shape


def _bitnet(module: ModuleTensors, tensor: HeaderTensor, stem: str) -> Logical:
    """Four ternary weights in a byte, packed along the rows."""
    return (tensor.shape[0] * 4, *tensor.shape[1:])


def _mlx(module: ModuleTensors, tensor: HeaderTensor, stem: str) -> Logical:
    """A layer may have its own bits; its group size is then stated under the layer's name."""
    scales = module.leaf("scales")
    own = module.settings.get(module.path)
    group = own.get("group_size") if isinstance(own, Mapping) else module.group_size
    if scales is not None and scales.shape and type(group) is int and group > 0:
        return (*tensor.shape[:-1], scales.shape[-1] * group)
    return _words(tensor, module.bits or 4)


def _hqq(module: ModuleTensors, tensor: HeaderTensor, stem: str) -> Logical:
    """One scale for every group; without the group size, bytes hold 8, 4, 2 or 1 weights and an int32 ten of 3 bits."""
    scale = module.leaf("scale")
    if scale is not None and module.group_size:
        return prod(scale.shape) * module.group_size
    bits = module.bits or 4
    return prod(tensor.shape) * 10 if bits == 3 else _words(tensor, bits)


def _aqlm(module: ModuleTensors, tensor: HeaderTensor, stem: str) -> Logical:
    """`codes`: (out/og, in/ig, codebooks), `codebooks`: (codebooks, entries, og, ig)."""
    books = module.leaf("codebooks")
    if books is None or len(books.shape) != 4 or len(tensor.shape) != 3:
        return prod(tensor.shape)
    return (tensor.shape[0] * books.shape[2], tensor.shape[1] * books.shape[3])


def _quanto(module: ModuleTensors, tensor: HeaderTensor, stem: str) -> Logical:
    return _words(tensor, module.bits) if tensor.dtype == "U8" else tensor.shape


def _torchao(module: ModuleTensors, tensor: HeaderTensor, stem: str) -> Logical:
    """The tensor subclass, written into `__metadata__`, says whether a byte holds one weight or two."""
    kind = module.subclass_of(stem)
    four = kind.startswith(("Int4", "NVFP4")) if kind else module.bits == 4 and "intx" not in module.method
    return tensor.nbytes * 2 if four else tensor.shape


def _sparse(module: ModuleTensors, tensor: HeaderTensor, stem: str) -> Logical:
    """Only non-zero weights are stored; one bit of the mask stands for each weight."""
    mask = module.leaf(f"{stem}.bitmask")
    return (*mask.shape[:-1], mask.shape[-1] * 8) if mask is not None and mask.shape else prod(tensor.shape)


_BYTES = frozenset({"U8", "I8"})
_WORDS = frozenset({"I32", "U32", "I16", "U16", "I64", "U8", "I8"})
_EIGHT = frozenset({"I8", "U8", "F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ"})
_ANY = frozenset[str]()
_STATE = ("*.quant_state.bitsandbytes__nf4", "*.quant_state.bitsandbytes__fp4")
_SCALES = ("*_scale_inv", "*_scale", "*_scales", "*_weight_scale", "scale")

# Order matters: the first row that fits a tensor is taken. Sources: the loaders of each library, named by the label.
PACKINGS: tuple[Packing, ...] = (
    Packing("GPTQ or AWQ words", "qweight", (), ("qzeros", "scales", "g_idx"), _WORDS, _gptq_or_awq),
    Packing(
        "compressed-tensors words",
        "weight_packed",
        (),
        (
            "weight_scale",
            "weight_zero_point",
            "weight_shape",
            "weight_g_idx",
            "weight_global_scale",
            "input_global_scale",
            "scale_packed",
            "meta",
            "input_scale",
        ),
        _ANY,
        _compressed,
    ),
    Packing("sparse bitmask", "*.compressed", ("*.bitmask",), ("*.bitmask", "*.row_offsets", "*.shape"), _ANY, _sparse),
    Packing("MXFP4 blocks", "*_blocks", ("*_scales",), ("*_scales",), _BYTES, _mxfp4),
    Packing(
        "bitsandbytes 4-bit",
        "*",
        ("*.absmax", *_STATE),
        ("*.absmax", "*.quant_map", "*.nested_absmax", "*.nested_quant_map", *_STATE),
        _ANY,
        _two_per_byte,
    ),
    Packing("bitsandbytes 8-bit", "weight", ("SCB",), ("SCB", "weight_format"), _BYTES, _as_stored),
    Packing("NVFP4", "*", ("*_scale_2",), ("*_scale", "*_scale_2", "input_scale"), _BYTES, _twice_as_wide),
    Packing("MLX words", "*", ("scales",), ("scales", "biases"), frozenset({"U32"}), _mlx),
    Packing(
        "torchao",
        "_*_qdata",
        (),
        (
            "_*_scale",
            "_*_zero_point",
            "_*_scale_and_zero",
            "_*_act_pre_scale",
            "_*_per_tensor_scale",
            "_*_group_scale",
            "_*_group_zero",
            "_*_row_scale",
        ),
        _ANY,
        _torchao,
    ),
    Packing("quanto", "*._data._data", ("*._scale",), ("*._scale", "*._shift"), _ANY, _quanto),
    Packing("quanto", "*._data", ("*._scale",), ("*._scale", "*._shift"), _ANY, _quanto),
    Packing("AQLM codes", "codes", ("codebooks",), ("codebooks", "scales"), _ANY, _aqlm),
    Packing(
        "HQQ",
        "W_q",
        (),
        (
            "scale",
            "zero",
            "axis",
            "group_size",
            "nbits",
            "packing",
            "shape",
            "channel_wise",
            "compute_dtype",
            "encoded_state_dict",
            "offload_meta",
            "optimize",
            "quant_scale",
            "quant_zero",
            "round_zero",
            "stores_quant_config",
            "unpack_view_dtype",
            "view_as_float",
        ),
        _ANY,
        _hqq,
    ),
    Packing("BitNet", "weight", ("weight_scale",), ("weight_scale",), _BYTES, _bitnet, frozenset({"bitnet"})),
    Packing("8-bit with scales", "*", _SCALES, (*_SCALES, "*_zero_point", "input_scale"), _EIGHT, _bytes_with_scales),
)
