"""What a file that is named .safetensors really is, told by its first bytes."""

import re

from memcalc.sources.checkpoint.byte_ranges import ByteRanges
from memcalc.sources.display_names import shown

# First bytes, what they mean, and what to do. Sources: the formats' own specifications.
SIGNATURES: tuple[tuple[bytes, str, str], ...] = (
    (b"PK\x03\x04", "a zip archive, as torch.save writes it", "save it with safetensors.torch.save_file"),
    (b"\x80\x02", "a Python pickle, as old torch.save writes it", "save it with safetensors.torch.save_file"),
    (b"\x80\x04", "a Python pickle", "save it with safetensors.torch.save_file"),
    (b"GGUF", "a GGUF file", "name it .gguf"),
    (b"\x89HDF", "an HDF5 file", "save it with safetensors.torch.save_file"),
    (b"\x1f\x8b", "a gzip archive", "unpack it first"),
    (b"<", "a web page", "an address or a login page was saved instead: download it again"),
    (b"{", "JSON text", "is it the index file of a sharded model?"),
)


def explain(source: ByteRanges, name: str, length: int) -> str:
    """Why `source` has no readable safetensors header, when its first 8 bytes claim `length` bytes of header."""
    start = source.read(0, 8)
    if start == b"version ":
        pointer = source.read(0, 200)
        size = re.search(rb"\nsize (\d{1,19})\s", pointer)
        of = f" of a file of {int(size[1]):,} bytes" if size else ""
        return f"{shown(name)} is a Git LFS pointer{of}, not the weights: run `git lfs pull` in its folder."
    for magic, what, then in SIGNATURES:
        if start.startswith(magic):
            return f"{shown(name)} is {what}, not a safetensors file: {then}."
    size_text = "" if source.size is None else f" while the file has {source.size:,}"
    if source.size is not None and 8 + length > source.size:
        return (
            f"{shown(name)} claims a header of {length:,} bytes{size_text}: it is cut short or no safetensors file, "
            "download it again."
        )
    if length <= 100_000_000:
        return f"{shown(name)} has no JSON header where a safetensors file has one: it is damaged, download it again."
    return (
        f"{shown(name)} claims a header of {length:,} bytes, over the limit of 100,000,000 that safetensors readers "
        "share: save it as several shards."
    )
