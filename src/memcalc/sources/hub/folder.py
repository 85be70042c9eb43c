"""A repository's files at one commit, read from the cache where it has them and by ranged requests where not."""

import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from memcalc.errors import CheckpointError, HubError
from memcalc.sources.display_names import shown
from memcalc.sources.file_selection import RepoFile
from memcalc.sources.hub.cache import HubCache
from memcalc.sources.hub.client import HubClient
from memcalc.sources.hub.deadline import at_once
from memcalc.sources.json_object import TEXT_CAP

T = TypeVar("T")

# Requests under way at once. A header takes three round trips (address, length, text): 200 shards take about 18 waits.
WORKERS = 40

# Progress is worth a line only when a person has begun to wait, seconds; then at most this often.
QUIET, EVERY = 1.0, 0.2

# Longer beginnings are not kept in the cache, bytes.
LONGEST_KEPT = 64_000_000


class HubFolder:
    """The files of `repo_id` at `commit`; `client` is None when there is no network."""

    partial = False

    def __init__(
        self,
        repo_id: str,
        commit: str,
        files: Sequence[RepoFile],
        client: HubClient | None,
        cache: HubCache | None,
        progress: Callable[[str], None] | None = None,
    ) -> None:
        self.name, self.commit = repo_id, commit
        self._files, self._client, self._cache, self._progress = tuple(files), client, cache, progress
        self._sizes = {file.path: file.nbytes for file in self._files}
        self._begun = self._said = time.monotonic()
        self.beginnings: dict[str, bytes] = {}
        self.from_cache: set[str] = set()
        self.addresses: dict[str, str] = {}
        self._lock = threading.Lock()

    def label(self, path: str) -> str:
        return f"{self.name}/{path}"

    def files(self) -> Sequence[RepoFile]:
        return self._files

    def open(self, path: str) -> "HubFile":
        size = self._sizes.get(path)
        kept = self.beginnings.get(path)
        if kept is None and self._cache and (kept := self._cache.beginning(self.commit, path)) is not None:
            self.from_cache.add(path)
        return HubFile(self, path, size, kept or b"")

    def text(self, path: str) -> bytes:
        file = self.open(path)
        if file.size is not None and file.size > TEXT_CAP:
            raise CheckpointError(
                f"{shown(self.label(path))} is {file.size:,} bytes long, too long for what it should be."
            )
        return file.whole()

    def each(self, work: Callable[[str], T], paths: Sequence[str], what: str) -> list[T]:
        """`work` on all paths, several at once; the first failure ends the others that have not begun.

        Of many large files, the addresses are asked for first: all requests then go to one host at a time, the Hub and
        after it the store that it redirects to, and each host's connections are used again.
        """
        if what == "headers" and len(paths) > WORKERS and self._client is not None:
            self._map(lambda path: self.open(path).locate(), paths, "addresses")
        return self._map(work, paths, what)

    def _map(self, work: Callable[[str], T], paths: Sequence[str], what: str) -> list[T]:
        if len(paths) < 2:
            return [work(path) for path in paths]
        done = 0

        def counted(path: str) -> T:
            nonlocal done
            result = work(path)
            with self._lock:
                done += 1
                self._tell(f"{shown(self.name)}: {done} of {len(paths)} {what}")
            return result

        return at_once(counted, paths, WORKERS)

    def _tell(self, text: str) -> None:
        now = time.monotonic()
        given_up = self._client is not None and self._client.given_up
        if self._progress and not given_up and now - self._begun > QUIET and now - self._said > EVERY:
            self._said = now
            self._progress(text)

    def url(self, path: str) -> str:
        from huggingface_hub import hf_hub_url

        address: str = hf_hub_url(self.name, path, revision=self.commit, endpoint=self.client_for(path).endpoint)
        return address

    def client_for(self, path: str) -> HubClient:
        if self._client is None:
            raise HubError(f"{shown(self.label(path))} is not in the cache; run this once with a network.")
        return self._client

    def keep(self, path: str, data: bytes) -> None:
        if len(data) <= LONGEST_KEPT:
            self.beginnings[path] = data


class HubFile:
    """One file of the repository. What is read from its beginning on is remembered, for the cache."""

    def __init__(self, folder: HubFolder, path: str, size: int | None, kept: bytes) -> None:
        self._folder, self._path, self._size = folder, path, size
        self._kept = kept

    @property
    def size(self) -> int | None:
        return self._size

    def read(self, offset: int, length: int) -> bytes:
        if self._size is not None:
            length = min(length, max(0, self._size - offset))
        if offset + length <= len(self._kept):
            return self._kept[offset : offset + length]
        client, first = self._folder.client_for(self._path), self._folder.url(self._path)
        direct = self._folder.addresses.get(self._path)
        try:
            piece = client.ranged(direct or first, offset, length)
        except HubError:
            if direct is None:
                raise
            piece = client.ranged(first, offset, length)  # a signed address has run out
        self._folder.addresses[self._path] = piece.url  # where the redirect led: the next piece needs no second one
        if self._size is None:
            self._size = piece.total
        if offset == len(self._kept):
            self._kept += piece.data
            self._folder.keep(self._path, self._kept)
        return piece.data

    def locate(self) -> None:
        """Ask where the file lies, unless it is in the cache; a host that answers at once sends its first bytes."""
        if not self._kept:
            piece = self._folder.client_for(self._path).ranged(self._folder.url(self._path), 0, 8, follow=False)
            self._folder.addresses[self._path] = piece.url
            if piece.data:
                self._folder.keep(self._path, piece.data)

    def whole(self) -> bytes:
        """A small file; an empty one is a file too."""
        if self._size is not None and len(self._kept) >= self._size:
            return self._kept
        if self._kept and self._path in self._folder.from_cache:
            return self._kept
        data = self._folder.client_for(self._path).whole(self._folder.url(self._path)).data
        web_page = data.lstrip()[:1] == b"<"  # is called one by whoever parses it
        if self._size is not None and len(data) < self._size and not web_page:
            label = shown(self._folder.label(self._path))
            raise CheckpointError(f"{label} is cut short ({len(data):,} of {self._size:,} bytes); try again.")
        self._folder.keep(self._path, data)
        return data
