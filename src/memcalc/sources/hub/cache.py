"""What was learnt about a repository, kept so that the same question needs no network.

A commit never changes, so its list of files and the beginnings of its files (whole small ones, headers of large ones)
stay true for ever. They lie in huggingface_hub's asset cache, where its own tools find and delete them. Every file
begins with a digest of the rest: a damaged one counts as none. Two Hubs never share an entry.
"""

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from memcalc.errors import CheckpointError
from memcalc.sources.checkpoint.shard_index import is_inside
from memcalc.sources.disk import DiskFile
from memcalc.sources.file_selection import RepoFile
from memcalc.sources.hub.listing import listed
from memcalc.sources.hub.names import is_commit

# Longer files are not kept, bytes.
LONGEST_KEPT = 64_000_000


class HubCache:
    """The cache of one repository of one Hub; every failure to read or write means "not cached".

    Args:
        repo_id: as `parse_name` gives it.
        endpoint: the Hub's address.
        root: in place of huggingface_hub's asset folder.
    """

    def __init__(self, repo_id: str, endpoint: str, root: Path | None = None) -> None:
        start = (root or asset_folder()) / "memcalc" / "hubs" / _digest(endpoint.encode("utf-8", "surrogatepass"))[:16]
        self.folder = start / f"models--{repo_id.replace('/', '--')}"

    def commit_of(self, revision: str) -> str | None:
        """The commit that a branch or tag was when it was last looked up."""
        if is_commit(revision):
            return revision if self.files(revision) else None
        refs = self._json("refs.json")
        commit = refs.get(revision) if isinstance(refs, dict) else None
        return commit if isinstance(commit, str) and is_commit(commit) else None

    def files(self, commit: str) -> tuple[RepoFile, ...] | None:
        """The list of files of a commit; None when it is not cached."""
        rows = self._json(commit, "files.json")
        return listed(rows) if isinstance(rows, list) else None

    def beginning(self, commit: str, path: str) -> bytes | None:
        """As much of a file as was read before."""
        return self._read(commit, _key(path))

    def store(self, revision: str, commit: str, files: Sequence[RepoFile], beginnings: Mapping[str, bytes]) -> None:
        """Keep what was read; `files.json` is written last, so that its presence means a whole entry."""
        if not is_commit(commit):
            return
        with contextlib.suppress(OSError):
            target = self.folder / commit
            target.mkdir(parents=True, exist_ok=True)
            for path, data in beginnings.items():
                _write(target / _key(path), data)
            rows = [{"path": file.path, "size": file.nbytes} for file in files]
            _write(target / "files.json", json.dumps(rows).encode())
            if not is_commit(revision):
                refs = self._json("refs.json")
                known = refs if isinstance(refs, dict) else {}
                _write(self.folder / "refs.json", json.dumps({**known, revision: commit}).encode())

    def _read(self, *names: str) -> bytes | None:
        try:
            digest, _, data = DiskFile(self.folder.joinpath(*names), {}).read(0, LONGEST_KEPT + 100).partition(b"\n")
        except CheckpointError:
            return None
        return data if digest == _digest(data).encode() else None

    def _json(self, *names: str) -> object:
        try:
            value: object = json.loads(self._read(*names) or b"null")
        except (ValueError, RecursionError):
            return None
        return value


def asset_folder() -> Path:
    """HF_ASSETS_CACHE or HF_HOME as they are set now, else what huggingface_hub found when it was imported."""
    from huggingface_hub import constants

    if explicit := os.environ.get("HF_ASSETS_CACHE"):
        return _expanded(explicit)
    if home := os.environ.get("HF_HOME"):
        return _expanded(home) / "assets"
    return Path(constants.HF_ASSETS_CACHE)


def snapshot_folder(repo_id: str, revision: str) -> Path | None:
    """Where huggingface_hub itself, or Transformers through it, has put this repository's files; None if nowhere."""
    from huggingface_hub import constants

    home = os.environ.get("HF_HOME")
    root = os.environ.get("HF_HUB_CACHE") or (str(Path(home) / "hub") if home else constants.HF_HUB_CACHE)
    folder = _expanded(root) / f"models--{repo_id.replace('/', '--')}"
    commit = revision
    try:
        if not is_commit(revision):
            if not is_inside(revision):
                return None
            commit = DiskFile(folder / "refs" / revision, {}).read(0, 200).decode().strip()
        found = folder / "snapshots" / commit
        return found if is_commit(commit) and found.is_dir() else None
    except (CheckpointError, OSError, ValueError):
        return None


def _expanded(path: str) -> Path:
    """`path` with "~" for the home folder, where there is one."""
    return Path(os.path.expanduser(path))


def _key(path: str) -> str:
    """A file name for any path that a server may send."""
    return _digest(path.encode("utf-8", "surrogatepass"))[:40]


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _write(path: Path, data: bytes) -> None:
    """Whole or not at all, also when two runs write at once."""
    if len(data) > LONGEST_KEPT:
        return
    handle, temporary = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(_digest(data).encode() + b"\n" + data)
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
