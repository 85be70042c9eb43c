"""GGUF files, header only: metadata, and the name, shape and type of each tensor.

Source: ggml's docs/gguf.md. Versions 2 and 3, in either byte order.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from types import MappingProxyType
from typing import Any, NamedTuple

from memcalc.config.quantization import Quantization
from memcalc.errors import CheckpointError
from memcalc.sources.checkpoint.byte_ranges import ByteRanges
from memcalc.sources.checkpoint.checkpoint import Checkpoint, IgnoredFile
from memcalc.sources.checkpoint.not_safetensors import SIGNATURES
from memcalc.sources.checkpoint.safetensors import MOST_TENSORS
from memcalc.sources.checkpoint.stored_tensor import Role, StoredTensor
from memcalc.sources.display_names import shown
from memcalc.sources.gguf.ggml_types import FILE_TYPES, GGML_TYPES
from memcalc.sources.gguf.reader import Cursor

VERSIONS = (2, 3)
MOST_DIMENSIONS = 8

# More than any published file has: about 3,000 tensors and 100 metadata entries.
MOST_PAIRS = 20_000

# Tensors that are tables of the position encoding, not weights. Source: llama.cpp's tensor names.
_TABLES = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


class GgufTensor(NamedTuple):
    """One tensor: `shape` in PyTorch's order (rows first), `nbytes` by its type's blocks."""

    name: str
    type: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    quantized: bool


@dataclass(frozen=True)
class GgufHeader:
    """What one GGUF file says. A metadata array too long to keep is a tuple of its length alone."""

    version: int
    metadata: Mapping[str, Any]
    tensors: tuple[GgufTensor, ...]
    nbytes: int
    notes: tuple[str, ...]

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture", ""))


def read_gguf(source: ByteRanges, name: str) -> GgufHeader:
    """Read and check the header of the GGUF file called `name`.

    Raises:
        CheckpointError: not GGUF, an unknown version, absurd counts, or cut short.
    """
    cursor = Cursor(source, name)
    version = _version(cursor, name)
    tensor_count = cursor.count(24, "tensors")
    pair_count = cursor.count(13, "metadata entries")
    if tensor_count > MOST_TENSORS or pair_count > MOST_PAIRS:
        raise CheckpointError(
            f"{shown(name)} claims {tensor_count:,} tensors and {pair_count:,} metadata entries, more than any model "
            "has: it is damaged, download it again."
        )
    metadata: dict[str, Any] = {}
    for _ in range(pair_count):
        key = cursor.text()
        if key in metadata:
            raise CheckpointError(f"{shown(name)} has the metadata key {shown(key)} twice: it is damaged.")
        metadata[key] = cursor.value(cursor.number("I"))
    raw = [_tensor_info(cursor, name) for _ in range(tensor_count)]
    if len({tensor for tensor, *_ in raw}) < len(raw):
        twice = next(tensor for tensor, count in Counter(tensor for tensor, *_ in raw).items() if count > 1)
        raise CheckpointError(f"{shown(name)} has the tensor {shown(twice)} twice: it is damaged, download it again.")
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 0 < alignment <= 1 << 20:
        raise CheckpointError(f"{shown(name)} states an alignment of {shown(alignment)}: it is damaged.")
    begin = -(-cursor.position // alignment) * alignment
    notes: list[str] = []
    tensors = _measured(raw, None if source.size is None else source.size - begin, name, notes)
    return GgufHeader(version, MappingProxyType(metadata), tensors, cursor.position, tuple(notes))


def _version(cursor: Cursor, name: str) -> int:
    magic = cursor.take(4)
    if magic != b"GGUF":
        what = next(
            (f"it is {text}" for start, text, _ in SIGNATURES if magic.startswith(start[:4])),
            "it starts otherwise, so download it again",
        )
        if magic == b"vers":
            what = "it is a Git LFS pointer, so run `git lfs pull` in its folder"
        raise CheckpointError(f"{shown(name)} is not a GGUF file: {what}.")
    version: int = cursor.number("I")
    if version & 0xFFFF == 0:
        cursor.order = ">"
        version = int.from_bytes(version.to_bytes(4, "little"), "big")
    if version not in VERSIONS:
        raise CheckpointError(
            f"{shown(name)} is GGUF version {version}, and memcalc reads versions 2 and 3: convert the model again."
        )
    return version


def _tensor_info(cursor: Cursor, name: str) -> tuple[str, tuple[int, ...], int, int]:
    tensor = cursor.text()
    dimensions = cursor.number("I")
    if dimensions > MOST_DIMENSIONS:
        raise CheckpointError(f"{shown(name)}: tensor {shown(tensor)} has {dimensions:,} dimensions: it is damaged.")
    sizes = tuple(cursor.number("Q") for _ in range(dimensions))
    if prod(sizes) >= 2**63:
        raise CheckpointError(f"{shown(name)}: tensor {shown(tensor)} has an absurd shape: it is damaged.")
    return tensor, sizes[::-1], cursor.number("I"), cursor.number("Q")


def _measured(
    raw: Sequence[tuple[str, tuple[int, ...], int, int]], data_bytes: int | None, name: str, notes: list[str]
) -> tuple[GgufTensor, ...]:
    """Bytes of each tensor by its type; for an unknown type, up to where the next tensor begins."""
    offsets = sorted({offset for *_, offset in raw} | ({data_bytes} if data_bytes is not None else set()))
    following = dict(pairwise(offsets))
    found, unknown = [], set()
    for tensor, shape, number, offset in raw:
        kind = GGML_TYPES.get(number)
        if kind is None:
            nbytes = following.get(offset, offset) - offset
            unknown.add(number)
        else:
            row = shape[-1] if shape else 1
            nbytes = -(-row // kind.block) * kind.nbytes * prod(shape[:-1])
        if data_bytes is not None and offset + nbytes > data_bytes:
            past = offset + nbytes - data_bytes
            raise CheckpointError(
                f"{shown(name)}: tensor {shown(tensor)} ends {past:,} bytes past the file's end; "
                "the file is cut short, download it again."
            )
        label = kind.name if kind else f"type {number}"
        found.append(GgufTensor(tensor, label, shape, offset, nbytes, kind is None or kind.block > 1))
    notes.extend(
        f"{shown(name)}: tensor type {n} is unknown here; its bytes come from the offsets" for n in sorted(unknown)
    )
    return tuple(found)


IMAGE_ARCHITECTURES = frozenset(
    (
        "flux",
        "flux2",
        "chroma",
        "sd1",
        "sdxl",
        "sd3",
        "aura",
        "hidream",
        "cosmos",
        "ltxv",
        "hyvid",
        "wan",
        "lumina2",
        "qwen_image",
        "z_image",
        "pixart",
    )
)
"""Architectures of denoisers, whose tensors have their original names (city96/ComfyUI-GGUF, tools/convert.py)."""


def _original_shape(header: GgufHeader, tensor: GgufTensor) -> tuple[int, ...]:
    """The shape before it was made to fit into GGUF's dimensions, where ComfyUI-GGUF's converter notes one."""
    noted = header.metadata.get(f"comfy.gguf.orig_shape.{tensor.name}")
    if not isinstance(noted, list) or not all(type(size) is int and size > 0 for size in noted):
        return tensor.shape
    return tuple(noted) if prod(noted) == prod(tensor.shape) else tensor.shape


def gguf_checkpoint(
    headers: Sequence[tuple[str, GgufHeader]], ignored: Sequence[IgnoredFile] = (), notes: Sequence[str] = ()
) -> Checkpoint:
    """One checkpoint out of a GGUF file, or out of all parts of a split one."""
    tensors = []
    collected = list(notes)
    for file, header in headers:
        collected.extend(header.notes)
        for tensor in header.tensors:
            role = Role.BUFFER if tensor.name in _TABLES else Role.QUANTIZED if tensor.quantized else Role.PARAMETER
            count = 0 if role is Role.BUFFER else prod(tensor.shape)
            tensors.append(
                StoredTensor(
                    tensor.name,
                    tensor.type,
                    tensor.nbytes,
                    file,
                    role,
                    tensor.name,
                    _original_shape(header, tensor),
                    count,
                )
            )
    first = headers[0][1]
    quantization = _recipe(first) if any(t.role is Role.QUANTIZED for t in tensors) else None
    text = {key: value for key, value in first.metadata.items() if isinstance(value, str)}
    return Checkpoint(
        tuple(tensors),
        tuple(file for file, _ in headers),
        "gguf",
        quantization,
        (),
        MappingProxyType(text),
        header_bytes=sum(header.nbytes for _, header in headers),
        ignored=tuple(ignored),
        notes=tuple(collected),
    )


def _recipe(header: GgufHeader) -> Quantization:
    number = header.metadata.get("general.file_type")
    name = FILE_TYPES.get(number, "mixed types") if type(number) is int else "mixed types"
    return Quantization(f"GGUF {name}", "general.file_type", None, None, MappingProxyType({}), True)
