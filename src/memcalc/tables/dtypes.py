"""Element types: one row a dtype. Bit widths are those of PyTorch's `torch.dtype` of the same name."""

from dataclasses import dataclass


@dataclass(frozen=True, eq=False)
class DType:
    """An element type: PyTorch's name for it, bytes per element, and its place in type promotion."""

    name: str
    itemsize: int
    rank: int
    floating: bool

    def __deepcopy__(self, memo: object) -> "DType":
        """Itself: a copied module has its weights in the same dtype, and dtypes are told apart by identity."""
        return self


BOOL = DType("bool", 1, 0, False)
UINT8 = DType("uint8", 1, 1, False)
INT8 = DType("int8", 1, 2, False)
INT32 = DType("int32", 4, 3, False)
INT64 = DType("int64", 8, 4, False)
FP8 = DType("float8_e4m3fn", 1, 5, True)
FP16 = DType("float16", 2, 6, True)
BF16 = DType("bfloat16", 2, 6, True)
FP32 = DType("float32", 4, 7, True)
FP64 = DType("float64", 8, 8, True)
COMPLEX64 = DType("complex64", 8, 9, True)
COMPLEX128 = DType("complex128", 16, 10, True)

ALIASES = {
    "fp32": FP32,
    "float32": FP32,
    "float": FP32,
    "fp16": FP16,
    "float16": FP16,
    "half": FP16,
    "bf16": BF16,
    "bfloat16": BF16,
    "float64": FP64,
    "fp64": FP64,
    "fp8": FP8,
    "float8_e4m3fn": FP8,
}


def short(dtype: DType) -> str:
    """How people call a dtype: fp32, bf16, fp16; PyTorch's name for the others."""
    return {FP32: "fp32", BF16: "bf16", FP16: "fp16", FP64: "fp64", FP8: "fp8"}.get(dtype, dtype.name)


def promote(a: DType, b: DType) -> "DType":
    """The dtype of an operation on tensors of dtypes `a` and `b` (torch.result_type; fp16 with bf16 gives fp32)."""
    if a is b:
        return a
    if a.rank == b.rank:
        return FP32
    return a if a.rank > b.rank else b
