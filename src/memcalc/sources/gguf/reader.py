"""Walk through the typed values of a GGUF header without ever holding the weights behind it."""

import struct
from typing import Any

from memcalc.errors import CheckpointError
from memcalc.sources.checkpoint.byte_ranges import ByteRanges
from memcalc.sources.display_names import shown

# No published header comes near: tokenizers of 250,000 words take about 10 MB.
HEADER_CAP = 100_000_000

# Bytes asked for at once: small at first, so that a short header costs little, then doubling up to the last.
FIRST_CHUNK, LAST_CHUNK = 1 << 16, 1 << 21

# Arrays longer than this (tokenizer words, merges, scores) are skipped; only their length is kept.
KEPT_ITEMS = 4096

# Items of all arrays that are kept: some numbers a layer.
MOST_KEPT = 100_000

# Words of all arrays that are stepped over one by one: tokenizers have about a million words and merges.
MOST_WORDS = 4_000_000

STRING, ARRAY = 8, 9

# struct codes of the fixed-size value types. Source: ggml's docs/gguf.md, enum gguf_metadata_value_type.
CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


class Cursor:
    """A reading position in `source`; integers follow the byte order that the header's version shows."""

    def __init__(self, source: ByteRanges, name: str) -> None:
        self.source, self.name = source, name
        self.order = "<"
        self.position = 0
        self._held = b""
        self._start = 0
        self._chunk = FIRST_CHUNK
        self._kept = self._words = 0

    def take(self, length: int) -> bytes:
        """The next `length` bytes."""
        self._hold(length)
        begin = self.position - self._start
        self.position += length
        return self._held[begin : begin + length]

    def skip(self, length: int) -> None:
        """Step over `length` bytes without reading what is not there yet."""
        self._check(self.position + length)
        self.position += length

    def number(self, code: str) -> Any:
        return struct.unpack(self.order + code, self.take(struct.calcsize(self.order + code)))[0]

    def count(self, least_bytes: int, what: str) -> int:
        """A 64-bit count of things that take `least_bytes` each; absurd ones are refused before anything is read."""
        found: int = self.number("Q")
        most = HEADER_CAP if self.source.size is None else min(HEADER_CAP, self.source.size - self.position)
        if found * least_bytes > most:
            raise CheckpointError(
                f"{shown(self.name)} claims {found:,} {what}, more than its header can hold: "
                "it is damaged or cut short, download it again."
            )
        return found

    def text(self) -> str:
        return self.take(self.count(1, "bytes of text")).decode("utf-8", "replace")

    def value(self, kind: int, depth: int = 0) -> Any:
        """One metadata value; a long array gives its length as an int in a one-item tuple."""
        if kind in CODES:
            return self.number(CODES[kind])
        if kind == STRING:
            return self.text()
        if kind != ARRAY or depth > 2:
            raise CheckpointError(
                f"{shown(self.name)} has a metadata value of unknown type {kind}: it is damaged, "
                "or written for a newer GGUF version."
            )
        return self._array(depth)

    def _array(self, depth: int) -> Any:
        kind = self.number("I")
        width = struct.calcsize(CODES[kind]) if kind in CODES else 8 if kind == STRING else 12
        length = self.count(width, "array items")
        if length <= KEPT_ITEMS and self._kept + length <= MOST_KEPT:
            self._kept += length
            return [self.value(kind, depth + 1) for _ in range(length)]
        self._words += 0 if kind in CODES else length
        if self._words > MOST_WORDS:
            raise CheckpointError(
                f"{shown(self.name)} holds over {MOST_WORDS:,} words in its metadata, more than any tokenizer has: "
                "it is damaged."
            )
        if kind in CODES:
            self.skip(length * width)
        elif kind == STRING:
            self._skip_strings(length)
        else:
            for _ in range(length):
                self.value(kind, depth + 1)
        return (length,)

    def _skip_strings(self, length: int) -> None:
        """Hundreds of thousands of tokenizer words: a tight loop, because it is most of the reading time."""
        unpack = struct.Struct(self.order + "Q").unpack_from
        for _ in range(length):
            if self.position + 8 > self._start + len(self._held) or self.position < self._start:
                self._hold(8)
            size = unpack(self._held, self.position - self._start)[0]
            self.position += 8 + size
            if self.position > HEADER_CAP:
                break
        self._check(self.position)

    def _check(self, end: int) -> None:
        if self.source.size is not None and end > self.source.size:
            raise CheckpointError(f"{shown(self.name)} ends inside its header: it is cut short, download it again.")
        if end > HEADER_CAP:
            raise CheckpointError(f"{shown(self.name)} has a header over {HEADER_CAP:,} bytes: it is damaged.")

    def _hold(self, length: int) -> None:
        """Make the next `length` bytes available, in chunks that grow."""
        end = self.position + length
        self._check(end)
        if self._start <= self.position and end <= self._start + len(self._held):
            return
        at = self._start + len(self._held)
        if self._start <= self.position <= at:
            kept = self._held[self.position - self._start :]
        else:
            kept, at = b"", self.position
        wanted = max(end - at, self._chunk)
        if self.source.size is not None:
            wanted = min(wanted, self.source.size - at)
        read = self.source.read(at, wanted)
        self._chunk = min(self._chunk * 2, LAST_CHUNK)
        self._held, self._start = kept + read, self.position
        if len(self._held) < length:
            raise CheckpointError(f"{shown(self.name)} ends inside its header: it is cut short, download it again.")
