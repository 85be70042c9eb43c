"""Models on disk: a folder, one weight file, an index, an adapter, a pipeline, a config alone."""

import os
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from memcalc.config.quantization import with_hf_quant
from memcalc.errors import CheckpointError, MemcalcError, close_matches
from memcalc.sources.diffusers import PIPELINE, is_pipeline, read_pipeline
from memcalc.sources.display_names import shown
from memcalc.sources.file_selection import ADAPTER_CONFIG, PICKLES, RepoFile
from memcalc.sources.json_object import TEXT_CAP, parse_object
from memcalc.sources.loaded_model import LoadedModel
from memcalc.sources.repository import HF_QUANT, read_model

T = TypeVar("T")

# How deep a folder is listed: `unet/model.safetensors` matters, what lies below is never the model's.
DEPTH = 2

# More files than any repository has: somebody gave `/` or a home folder.
MOST_FILES = 100_000

_Identity = tuple[int, int, int, int]


class DiskFile:
    """A regular file, read in pieces. Each piece is read from the file that was there when it was first opened."""

    def __init__(self, path: Path, seen: dict[Path, _Identity]) -> None:
        self.path, self._seen = path, seen
        with self._opened() as (_, status):
            self._size = status.st_size

    @property
    def size(self) -> int | None:
        return self._size

    def read(self, offset: int, length: int) -> bytes:
        with self._opened() as (handle, _):
            parts = []
            try:
                os.lseek(handle, offset, os.SEEK_SET)
                while length > 0 and (part := os.read(handle, min(length, 1 << 24))):
                    parts.append(part)
                    length -= len(part)
            except OSError as problem:
                raise CheckpointError(f"{shown(self.path)} cannot be read: {_why(problem)}.") from None
            return b"".join(parts)

    def _opened(self) -> "_Open":
        return _Open(self.path, self._seen)


class _Open:
    """Open without blocking on a pipe, and refuse a file that is not the one seen before."""

    def __init__(self, path: Path, seen: dict[Path, _Identity]) -> None:
        self.path, self.seen = path, seen

    def __enter__(self) -> tuple[int, os.stat_result]:
        try:
            self.handle = os.open(self.path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
        except (OSError, ValueError) as problem:
            raise CheckpointError(f"{shown(self.path)} cannot be opened: {_why(problem)}.") from None
        status = os.fstat(self.handle)
        try:
            if not stat.S_ISREG(status.st_mode):
                raise CheckpointError(f"{shown(self.path)} is not a regular file; give the model's own file.")
            if self.seen.setdefault(self.path, _identity(status)) != _identity(status):
                raise Replaced(
                    f"{shown(self.path)} changed while it was read; try again when the copy or download has finished."
                )
        except MemcalcError:
            os.close(self.handle)
            raise
        return self.handle, status

    def __exit__(self, *_: object) -> None:
        os.close(self.handle)


class Replaced(CheckpointError):
    """A file changed while it was read."""


def _identity(status: os.stat_result) -> _Identity:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _why(problem: OSError | ValueError) -> str:
    """The system's reason in words: the file is missing, forbidden, or a symbolic link in a circle."""
    if isinstance(problem, OSError) and problem.strerror:
        return problem.strerror[0].lower() + problem.strerror[1:]
    return "its name is not one that a file can have"


class DiskFolder:
    """A folder on disk. Only the names are listed at first; files are opened when they are asked for."""

    def __init__(self, path: Path, *, partial: bool = False, name: str | None = None) -> None:
        self.path, self.partial = path, partial
        self.name = name or str(path)
        self.seen: dict[Path, _Identity] = {}
        self._files: list[RepoFile] | None = None

    def label(self, path: str) -> str:
        return str(self.path / path)

    def files(self) -> Sequence[RepoFile]:
        if self._files is None:
            self._files = []
            self._list(self.path, "", DEPTH)
        return self._files

    def _list(self, folder: Path, start: str, depth: int) -> None:
        assert self._files is not None
        try:
            entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
        except OSError as problem:
            if not start:
                raise CheckpointError(f"{shown(folder)} cannot be listed: {_why(problem)}.") from None
            return
        for entry in entries:
            if len(self._files) > MOST_FILES:
                raise CheckpointError(
                    f"{shown(self.path)} holds too many files for a model; give the model's own folder."
                )
            if _is_folder(entry):
                if depth > 1 and not entry.name.startswith("."):
                    self._list(folder / entry.name, f"{start}{entry.name}/", depth - 1)
            else:
                self._files.append(RepoFile(start + entry.name, _nbytes(entry)))

    def text(self, path: str) -> bytes:
        file = self.open(path)
        if (file.size or 0) > TEXT_CAP:
            raise CheckpointError(
                f"{shown(self.path / path)} is {file.size:,} bytes long, too long for what it should be."
            )
        return file.read(0, TEXT_CAP)

    def open(self, path: str) -> DiskFile:
        return DiskFile(self.path / path, self.seen)

    def each(self, work: Callable[[str], T], paths: Sequence[str], what: str) -> list[T]:
        return [work(path) for path in paths]

    def check_unchanged(self) -> None:
        """Raise Replaced when a file that was read is not the same any more."""
        for path in list(self.seen):
            with _Open(path, self.seen):
                pass


def _is_folder(entry: "os.DirEntry[str]") -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a symbolic link in a circle is no folder; opening it says why
        return False


def _nbytes(entry: "os.DirEntry[str]") -> int | None:
    try:
        return entry.stat().st_size
    except OSError:
        return None


def load_path(path: Path, wanted: str | None = None) -> LoadedModel:
    """What lies at `path`; a file that is replaced meanwhile is read once more before giving up.

    Args:
        path: a folder or a file.
        wanted: one weight file or GGUF type of a folder that has several.

    Raises:
        CheckpointError, ConfigError: nothing is there, it is no model, or it is damaged.
    """
    try:
        return _load(path, wanted)
    except Replaced:
        return _load(path, wanted)


def _load(path: Path, wanted: str | None) -> LoadedModel:
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError) as problem:
        raise CheckpointError(f"{shown(path)} cannot be read: {_why(problem)}{_neighbours(path) or '.'}") from None
    if stat.S_ISDIR(mode):
        return load_folder(DiskFolder(path), "file", wanted)
    folder = DiskFolder(path.parent, name=str(path))
    name = path.name
    if name.endswith(".json"):
        return _load_json(path, folder)
    if name.endswith(PICKLES):
        raise CheckpointError(
            f"{shown(path)} is a pickle, which memcalc never opens; give its config.json, or save it as safetensors."
        )
    if not name.endswith((".safetensors", ".gguf")):
        raise CheckpointError(
            f"{shown(path)} is no file that memcalc knows; give a config.json, a .safetensors or .gguf, or a folder."
        )
    if name.startswith("adapter_model") and (path.parent / ADAPTER_CONFIG).exists():
        return load_folder(DiskFolder(path.parent), "file")
    return _checked(folder, read_model(folder, "file", wanted=name))


def load_folder(folder: DiskFolder, origin: str, wanted: str | None = None) -> LoadedModel:
    """A model's folder, an adapter's, or a pipeline's."""
    pipeline = is_pipeline(folder.files(), wanted)
    return _checked(folder, (read_pipeline if pipeline else read_model)(folder, origin, wanted))


def _load_json(path: Path, folder: DiskFolder) -> LoadedModel:
    """A config alone, or a file that stands for its folder: an index, an adapter's config, a pipeline's."""
    whole = DiskFolder(path.parent)
    if path.name == PIPELINE or path.name == ADAPTER_CONFIG:
        return load_folder(whole, "file")
    content = parse_object(folder.text(path.name), str(path))
    if "weight_map" in content:
        return _checked(whole, read_model(whole, "file", wanted=path.name))
    hf_quant = path.parent / HF_QUANT
    if hf_quant.is_file():
        content = with_hf_quant(content, parse_object(folder.text(HF_QUANT), str(hf_quant)))
    return _checked(folder, LoadedModel(str(path), "file", content, None, config_file=path.name))


def _checked(folder: DiskFolder, model: LoadedModel) -> LoadedModel:
    folder.check_unchanged()
    return model


def _neighbours(path: Path) -> str:
    try:
        return close_matches(path.name, [entry.name for entry in os.scandir(path.parent) if entry.name != path.name])
    except (OSError, ValueError):
        return ""
