"""Models on the Hub: their config, and the headers of their weights; never the weights.

Everything goes through huggingface_hub's session, address builder, login and caches. It is imported only here and in
the modules that this one uses, inside functions, because importing it costs more than an answer.
"""

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from memcalc.errors import CheckpointError, ConfigError, HubError, MemcalcError
from memcalc.sources.diffusers import PIPELINE, read_pipeline
from memcalc.sources.disk import DiskFolder, load_folder
from memcalc.sources.display_names import shown
from memcalc.sources.file_selection import RepoFile
from memcalc.sources.hub.cache import HubCache, snapshot_folder
from memcalc.sources.hub.client import DEFAULT_TIMEOUT, HubClient, endpoint_now, token_now
from memcalc.sources.hub.errors import Missing, NoRevision
from memcalc.sources.hub.folder import HubFolder
from memcalc.sources.hub.names import parse_name
from memcalc.sources.hub.suggestions import missing_model, missing_revision
from memcalc.sources.hub.transport import Unreachable
from memcalc.sources.loaded_model import LoadedModel
from memcalc.sources.repository import read_model

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Listing:
    """A repository at one commit: its id (which may differ from the one asked for, after a move) and its files."""

    repo_id: str
    commit: str
    files: tuple[RepoFile, ...]


def load_hub(
    name: str,
    *,
    revision: str | None = None,
    token: str | None = None,
    timeout: float = DEFAULT_TIMEOUT,
    wanted: str | None = None,
    endpoint: str | None = None,
    cache_folder: Path | None = None,
    progress: Progress | None = None,
) -> LoadedModel:
    """The model called `name` on the Hub.

    Args:
        name: an id or the address of a page; `revision` wins over one in the address.
        revision: a branch, tag or commit; the default branch when None.
        token: for gated and private repositories; the login's when None.
        timeout: the longest wait for an answer, seconds.
        wanted: one weight file or GGUF type of the repository.
        endpoint, cache_folder: in place of HF_ENDPOINT and HF_ASSETS_CACHE.
        progress: is called with a line of text when reading takes longer than a second.

    Raises:
        HubError: the Hub refuses, cannot be reached, or has no such model.
        CheckpointError, ConfigError: what it has cannot be read.
        UsageError: `name` is no model's id.
    """
    address = (endpoint or endpoint_now()).rstrip("/")
    asked = parse_name(name, address)
    at = revision or asked.revision or "main"
    cache = HubCache(asked.repo_id, cache_folder)
    if offline():
        return _from_cache(asked.repo_id, at, cache, wanted, "HF_HUB_OFFLINE is set")
    client = HubClient(address, token_now(token), timeout)
    client.repo_id = asked.repo_id
    try:
        listing = _listing(client, asked.repo_id, at, cache)
    except Unreachable as problem:
        try:
            return _from_cache(asked.repo_id, at, cache, wanted, "the Hub cannot be reached")
        except HubError:
            raise problem from None
    except NoRevision:
        raise missing_revision(client, asked.repo_id, at) from None
    except Missing as problem:
        raise missing_model(client, asked.repo_id, problem) from None
    return _online(client, listing, at, cache, wanted, progress)


def offline() -> bool:
    """Whether HF_HUB_OFFLINE (or TRANSFORMERS_OFFLINE) forbids the network, now or when the library was imported."""
    from huggingface_hub import constants

    text = os.environ.get("HF_HUB_OFFLINE") or os.environ.get("TRANSFORMERS_OFFLINE") or ""
    return text.upper() in ("1", "ON", "YES", "TRUE") or bool(constants.HF_HUB_OFFLINE)


def _online(
    client: HubClient, listing: Listing, revision: str, cache: HubCache, wanted: str | None, progress: Progress | None
) -> LoadedModel:
    folder = HubFolder(listing.repo_id, listing.commit, listing.files, client, cache, progress)
    try:
        model = _read(folder, "hub", wanted)
    except (CheckpointError, ConfigError):
        if not folder.from_cache:
            raise
        folder = HubFolder(listing.repo_id, listing.commit, listing.files, client, None, progress)  # a spoilt cache
        model = _read(folder, "hub", wanted)
    cache.store(revision, listing.commit, listing.files, folder.beginnings)
    notes = model.notes
    if listing.repo_id != client.repo_id:
        notes = (*notes, f"{shown(client.repo_id)} is now called {shown(listing.repo_id)}")
    return replace(model, revision=listing.commit, traffic=client.traffic, notes=notes)


def _read(folder: HubFolder, origin: str, wanted: str | None) -> LoadedModel:
    if not wanted and any(file.path == PIPELINE for file in folder.files()):
        return read_pipeline(folder, origin)
    return read_model(folder, origin, wanted)


def _listing(client: HubClient, repo_id: str, revision: str, cache: HubCache) -> Listing:
    """The files at `revision`; a commit that is cached needs no request."""
    commit = cache.commit_of(revision) if revision == cache.commit_of(revision) else None
    known = cache.files(commit) if commit else None
    if commit and known:
        return Listing(repo_id, commit, known)
    url = f"{client.endpoint}/api/models/{quote(repo_id)}/revision/{quote(revision, safe='')}?blobs=true"
    info = _json(client.whole(url).data, client)
    sha, rows = info.get("sha"), info.get("siblings")
    if not isinstance(sha, str) or not sha:
        raise HubError(f"{shown(client.endpoint)} did not say which commit {shown(repo_id)} is at; check HF_ENDPOINT.")
    said = info.get("id")
    name = said if isinstance(said, str) else repo_id
    files = _files(rows, "rfilename") if isinstance(rows, list) else ()
    if not files or all(file.nbytes is None for file in files):
        files = _tree(client, name, sha)
    return Listing(name, sha, files)


def _tree(client: HubClient, repo_id: str, commit: str) -> tuple[RepoFile, ...]:
    """The same from the tree, page by page, where the model's own answer has no sizes (mirrors)."""
    url: str | None = f"{client.endpoint}/api/models/{quote(repo_id)}/tree/{commit}?recursive=true&expand=false"
    found: list[RepoFile] = []
    for _ in range(200):
        if url is None:
            break
        piece = client.whole(url)
        try:
            rows = json.loads(piece.data)
        except ValueError:
            raise _not_json(client) from None
        found.extend(_files([row for row in rows if isinstance(row, dict) and row.get("type") != "directory"], "path"))
        url = piece.next_page
    return tuple(found)


def _files(rows: Sequence[Any], key: str) -> tuple[RepoFile, ...]:
    """Rows of the Hub's answer; a large file's `size` may be that of its pointer, its `lfs` has the true one."""
    found = []
    for row in rows:
        if not isinstance(row, dict) or not isinstance(row.get(key), str):
            continue
        lfs = row.get("lfs")
        size = lfs.get("size") if isinstance(lfs, dict) else row.get("size")
        found.append(RepoFile(row[key], size if type(size) is int and size >= 0 else None))
    return tuple(found)


def _json(data: bytes, client: HubClient) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        raise _not_json(client) from None
    if not isinstance(value, dict):
        raise _not_json(client)
    return value


def _not_json(client: HubClient) -> HubError:
    return HubError(
        f"{shown(client.endpoint)} answered with a web page instead of data; a login page or proxy is in between, "
        "or HF_ENDPOINT is wrong."
    )


def _from_cache(repo_id: str, revision: str, cache: HubCache, wanted: str | None, why: str) -> LoadedModel:
    """The answer without the network: from our own cache, else from the files that huggingface_hub has downloaded."""
    note = f"{why}; answered from the cache"
    commit = cache.commit_of(revision)
    files = cache.files(commit) if commit else None
    if commit and files:
        model = _read(HubFolder(repo_id, commit, files, None, cache), "cache", wanted)
        return replace(model, revision=commit, notes=(*model.notes, note))
    snapshot = snapshot_folder(repo_id, revision)
    if snapshot is None:
        raise HubError(
            f"{shown(repo_id)} at {shown(revision)} is not in the cache and {why}; run this once with a network, "
            "or use from-file on a copy."
        )
    try:
        model = load_folder(DiskFolder(snapshot, partial=True, name=repo_id), "cache")
    except MemcalcError as problem:
        raise HubError(
            f"the cached copy of {shown(repo_id)} cannot be used ({problem}); run this with a network."
        ) from None
    return replace(model, revision=snapshot.name, notes=(*model.notes, note))
