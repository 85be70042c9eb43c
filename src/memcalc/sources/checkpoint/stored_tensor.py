"""One tensor of a checkpoint, with its meaning."""

from enum import StrEnum
from typing import NamedTuple


class Role(StrEnum):
    """What a tensor is for."""

    PARAMETER = "parameter"
    QUANTIZED = "quantized weight"
    CONSTANT = "quantization constant"
    BUFFER = "buffer"


class StoredTensor(NamedTuple):
    """`nbytes` is what the file holds; `parameters` how many model parameters that stands for.

    `weight` and `shape` name the unpacked weight (`shape` is None where the header does not tell it); `packing` says
    how it is packed, empty for what is not.
    """

    name: str
    dtype: str
    nbytes: int
    file: str
    role: Role
    weight: str
    shape: tuple[int, ...] | None
    parameters: int
    packing: str = ""
