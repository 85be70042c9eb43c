"""A file that can be read in pieces, wherever it lies."""

from typing import Protocol


class ByteRanges(Protocol):
    """A file on disk, behind HTTP or in the cache; headers are read through it."""

    @property
    def size(self) -> int | None:
        """Bytes in the file; None when nobody said."""

    def read(self, offset: int, length: int) -> bytes:
        """`length` bytes from `offset`; fewer where the file ends."""
