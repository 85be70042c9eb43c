"""What was learnt about a repository, kept so that the same question needs no network.

A commit never changes, so its list of files and the beginnings of its files (whole small ones, headers of large ones)
stay true for ever. They lie in huggingface_hub's asset cache, where its own tools find and delete them.
"""

import contextlib
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from memcalc.sources.checkpoint.shard_index import is_inside
from memcalc.sources.file_selection import RepoFile

_SHA = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


def is_commit(revision: str | None) -> bool:
    return revision is not None and _SHA.fullmatch(revision) is not None


class HubCache:
    """The cache of one repository; every failure to read or write means "not cached"."""

    def __init__(self, repo_id: str, root: Path | None = None) -> None:
        self.folder = (root or asset_folder()) / "memcalc" / "headers" / f"models--{repo_id.replace('/', '--')}"

    def commit_of(self, revision: str) -> str | None:
        """The commit that a branch or tag was when it was last looked up."""
        if is_commit(revision):
            return revision if (self.folder / revision / "files.json").is_file() else None
        refs = _json(self.folder / "refs.json")
        commit = refs.get(revision) if isinstance(refs, dict) else None
        return commit if isinstance(commit, str) and is_commit(commit) else None

    def files(self, commit: str) -> tuple[RepoFile, ...] | None:
        """The list of files of a commit; None when it is not cached."""
        rows = _json(self.folder / commit / "files.json")
        if not isinstance(rows, list):
            return None
        return tuple(
            RepoFile(row[0], row[1] if type(row[1]) is int else None)
            for row in rows
            if isinstance(row, list) and len(row) == 2 and isinstance(row[0], str)
        )

    def beginning(self, commit: str, path: str) -> bytes | None:
        """As much of a file as was read before."""
        try:
            return (self.folder / commit / _key(path)).read_bytes()
        except OSError:
            return None

    def store(self, revision: str, commit: str, files: Sequence[RepoFile], beginnings: Mapping[str, bytes]) -> None:
        """Keep what was read; `files.json` is written last, so that its presence means a whole entry."""
        with contextlib.suppress(OSError):
            target = self.folder / commit
            target.mkdir(parents=True, exist_ok=True)
            for path, data in beginnings.items():
                _write(target / _key(path), data)
            _write(target / "files.json", json.dumps([[file.path, file.nbytes] for file in files]).encode())
            if not is_commit(revision):
                refs = _json(self.folder / "refs.json")
                known = refs if isinstance(refs, dict) else {}
                _write(self.folder / "refs.json", json.dumps({**known, revision: commit}).encode())


def asset_folder() -> Path:
    """HF_ASSETS_CACHE or HF_HOME as they are set now, else what huggingface_hub found when it was imported."""
    from huggingface_hub import constants

    if explicit := os.environ.get("HF_ASSETS_CACHE"):
        return Path(explicit).expanduser()
    if home := os.environ.get("HF_HOME"):
        return Path(home).expanduser() / "assets"
    return Path(constants.HF_ASSETS_CACHE)


def snapshot_folder(repo_id: str, revision: str) -> Path | None:
    """Where huggingface_hub itself, or Transformers through it, has put this repository's files; None if nowhere."""
    from huggingface_hub import constants

    home = os.environ.get("HF_HOME")
    root = os.environ.get("HF_HUB_CACHE") or (str(Path(home) / "hub") if home else constants.HF_HUB_CACHE)
    folder = Path(root).expanduser() / f"models--{repo_id.replace('/', '--')}"
    commit = revision
    if not is_commit(revision):
        if not is_inside(revision):
            return None
        try:
            commit = (folder / "refs" / revision).read_text().strip()
        except (OSError, ValueError):
            return None
    found = folder / "snapshots" / commit
    return found if is_commit(commit) and found.is_dir() else None


def _key(path: str) -> str:
    """A file name for any path that a server may send."""
    return hashlib.sha256(path.encode("utf-8", "surrogatepass")).hexdigest()[:40]


def _json(path: Path) -> object:
    try:
        value: object = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return value


def _write(path: Path, data: bytes) -> None:
    """Whole or not at all, also when two runs write at once."""
    handle, temporary = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
