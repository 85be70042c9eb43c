"""What a model's files can be asked, whether they lie on disk, on the Hub or in the cache."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from memcalc.sources.checkpoint.byte_ranges import ByteRanges
from memcalc.sources.file_selection import RepoFile

T = TypeVar("T")


class Folder(Protocol):
    """A set of files under one name."""

    @property
    def name(self) -> str:
        """The folder's path, or the repository's id."""

    @property
    def partial(self) -> bool:
        """Whether files that should be there may be missing without fault (a cache)."""

    def label(self, path: str) -> str:
        """What to call a file of it in messages."""

    def files(self) -> Sequence[RepoFile]:
        """Every file, two folders deep."""

    def text(self, path: str) -> bytes:
        """A small file, whole."""

    def open(self, path: str) -> ByteRanges:
        """A large file, to be read in pieces."""

    def each(self, work: Callable[[str], T], paths: Sequence[str], what: str) -> list[T]:
        """`work` on every path, in order; several at once where waiting is the cost. `what` names them for progress."""


@dataclass(frozen=True)
class SubFolder:
    """A folder inside another one, as the component of a pipeline."""

    parent: Folder
    path: str

    @property
    def name(self) -> str:
        return f"{self.parent.name}/{self.path}"

    @property
    def partial(self) -> bool:
        return self.parent.partial

    def label(self, path: str) -> str:
        return self.parent.label(f"{self.path}/{path}")

    def files(self) -> Sequence[RepoFile]:
        start = f"{self.path}/"
        return [
            RepoFile(file.path.removeprefix(start), file.nbytes)
            for file in self.parent.files()
            if file.path.startswith(start)
        ]

    def text(self, path: str) -> bytes:
        return self.parent.text(f"{self.path}/{path}")

    def open(self, path: str) -> ByteRanges:
        return self.parent.open(f"{self.path}/{path}")

    def each(self, work: Callable[[str], T], paths: Sequence[str], what: str) -> list[T]:
        return self.parent.each(work, paths, what)
