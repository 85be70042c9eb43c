"""The header of a safetensors file: 8 bytes of length, then that much JSON; the weights behind it are never read.

Source: the format's description at https://huggingface.co/docs/safetensors (names, shapes, dtypes, `data_offsets`,
header limit of 100 MB).
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from operator import attrgetter
from types import MappingProxyType
from typing import Any, NamedTuple

from memcalc.errors import CheckpointError
from memcalc.sources.checkpoint.byte_ranges import ByteRanges
from memcalc.sources.checkpoint.not_safetensors import explain
from memcalc.sources.display_names import shown
from memcalc.sources.json_object import parse_object

# The official reader refuses longer headers; so does this one, before allocating anything.
HEADER_CAP = 100_000_000

# More tensors than any file has: published ones of mixtures of experts come to about 130,000.
MOST_TENSORS = 250_000

# PyTorch tensors have at most 64 dimensions.
MOST_DIMENSIONS = 64

# Bits of one element. Source: safetensors' own dtype list, and the FP8 and FP4 spellings that published files use.
BITS: Mapping[str, int] = MappingProxyType(
    {
        "F4": 4,
        "F6_E2M3": 6,
        "F6_E3M2": 6,
        "BOOL": 8,
        "U8": 8,
        "I8": 8,
        "F8_E4M3": 8,
        "F8_E5M2": 8,
        "F8_E8M0": 8,
        "F8_E4M3FNUZ": 8,
        "F8_E5M2FNUZ": 8,
        "U16": 16,
        "I16": 16,
        "F16": 16,
        "BF16": 16,
        "U32": 32,
        "I32": 32,
        "F32": 32,
        "U64": 64,
        "I64": 64,
        "F64": 64,
        "C64": 64,
    }
)


class HeaderTensor(NamedTuple):
    """One tensor as the header describes it; `begin` and `end` are bytes into the data behind the header."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        """Stored bytes: from the offsets, which need no table of dtypes."""
        return self.end - self.begin


@dataclass(frozen=True)
class Header:
    """All tensors of one file, in file order; `nbytes` is the length prefix and the JSON together."""

    tensors: tuple[HeaderTensor, ...]
    metadata: Mapping[str, str]
    nbytes: int
    notes: tuple[str, ...] = ()


_BY_PLACE = attrgetter("begin", "end")


def read_header(source: ByteRanges, name: str) -> Header:
    """Read and check the header of the file called `name`, and nothing behind it.

    Raises:
        CheckpointError: it is no safetensors file, is damaged or cut short, or its header is longer than `HEADER_CAP`.
    """
    start = source.read(0, 8)
    if len(start) < 8:
        raise CheckpointError(f"{shown(name)} holds only {len(start)} bytes: it is cut short, download it again.")
    length = int.from_bytes(start, "little")
    left = None if source.size is None else source.size - 8
    if length > HEADER_CAP or (left is not None and length > left):
        raise CheckpointError(explain(source, name, length))
    text = source.read(8, length)
    if len(text) < length:
        raise CheckpointError(
            f"{shown(name)} ends after {len(text):,} of its header's {length:,} bytes: it is cut short, download again."
        )
    if not text.startswith(b"{"):
        raise CheckpointError(explain(source, name, length))
    return parse_header(text, name, None if left is None else left - length)


def parse_header(text: bytes, name: str, data_bytes: int | None) -> Header:
    """The header's JSON `text`; `data_bytes` is what the file holds behind it, None when unknown.

    Raises:
        CheckpointError: invalid JSON, repeated keys, or tensors whose description cannot be true.
    """
    raw = parse_object(text, f"the header of {name}", CheckpointError, most_keys=4 * MOST_TENSORS)
    notes: list[str] = []
    metadata = _metadata(raw.pop("__metadata__"), name, notes) if "__metadata__" in raw else {}
    # Taken out one by one, so that what was parsed and what is made of it are not both held.
    tensors = sorted((_tensor(key, raw.pop(key), name) for key in list(raw)), key=_BY_PLACE)
    _check_extents(tensors, data_bytes, name, notes)
    _check_sizes(tensors, name, notes)
    return Header(tuple(tensors), MappingProxyType(metadata), 8 + len(text), tuple(notes))


def _metadata(value: Any, name: str, notes: list[str]) -> dict[str, str]:
    """`__metadata__` should map strings to strings; whatever else people wrote is noted and read as text."""
    if not isinstance(value, dict):
        notes.append(f"{shown(name)}: __metadata__ is {type(value).__name__}, not an object; ignored")
        return {}
    if any(not isinstance(item, str) for item in value.values()):
        notes.append(f"{shown(name)}: __metadata__ has values that are not strings; read as text")
    return {key: item if isinstance(item, str) else str(item) for key, item in value.items()}


def _tensor(key: str, entry: Any, name: str) -> HeaderTensor:
    wrong = ""
    dtype, shape, offsets = _three(entry) if isinstance(entry, dict) else ("", [], [])
    if not isinstance(entry, dict):
        wrong = "is not described by an object"
    elif not isinstance(dtype, str):
        wrong = "has no dtype"
    elif not isinstance(shape, list) or len(shape) > MOST_DIMENSIONS or not all(map(_is_size, shape)):
        wrong = "has a shape that is not a list of sizes"
    elif prod(shape) >= 2**63:
        wrong = "has a shape of more elements than any file holds"
    elif not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_size, offsets)):
        wrong = "has no pair of data_offsets"
    elif offsets[1] < offsets[0]:
        wrong = f"has data_offsets that run backwards ({offsets[0]:,} to {offsets[1]:,})"
    elif prod(shape) * BITS.get(dtype, 8) % 8:
        wrong = f"has {prod(shape):,} elements of {BITS[dtype]} bits, which fill no whole number of bytes"
    if wrong:
        raise CheckpointError(f"{shown(name)}: tensor {shown(key)} {wrong}; the header is damaged, download it again.")
    return HeaderTensor(key, sys.intern(dtype), tuple(shape), offsets[0], offsets[1])


def _three(entry: Mapping[str, Any]) -> tuple[Any, Any, Any]:
    return entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")


def _is_size(value: Any) -> bool:
    """A whole number that fits 63 bits: `true` and `1e3` are not, and neither is what only Python could count."""
    return type(value) is int and 0 <= value < 2**63


def _check_extents(tensors: list[HeaderTensor], data_bytes: int | None, name: str, notes: list[str]) -> None:
    end, owner = 0, ""
    holes = 0
    for tensor in tensors:
        if tensor.begin < end and tensor.nbytes:
            both = f"{shown(owner)} and {shown(tensor.name)}"
            raise CheckpointError(f"{shown(name)}: tensors {both} overlap; the header is damaged, download it again.")
        if tensor.nbytes:
            holes += tensor.begin - end
            end, owner = tensor.end, tensor.name
        if data_bytes is not None and tensor.end > data_bytes:
            raise CheckpointError(
                f"{shown(name)}: tensor {shown(tensor.name)} ends {tensor.end - data_bytes:,} bytes past the file's "
                "end; the file is cut short, download it again."
            )
    if holes:
        notes.append(f"{shown(name)}: {holes:,} bytes between tensors belong to none")
    if data_bytes is not None and data_bytes > end:
        notes.append(f"{shown(name)}: {data_bytes - end:,} bytes after the last tensor belong to none")


def _check_sizes(tensors: list[HeaderTensor], name: str, notes: list[str]) -> None:
    unknown = sorted({t.dtype for t in tensors if t.dtype not in BITS})
    notes.extend(f"{shown(name)}: dtype {shown(d)} is unknown here; its bytes come from the offsets" for d in unknown)
    odd = [t for t in tensors if t.dtype in BITS and prod(t.shape) * BITS[t.dtype] // 8 != t.nbytes]
    if odd:
        need = prod(odd[0].shape) * BITS[odd[0].dtype] // 8
        notes.append(
            f"{shown(name)}: {len(odd):,} tensors take other bytes than shape and dtype need, "
            f"{shown(odd[0].name)} first ({odd[0].nbytes:,} instead of {need:,}); the offsets are used"
        )
