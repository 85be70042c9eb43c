"""The list of a repository's files, as the Hub or the cache states it: rows of somebody else's JSON."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from memcalc.errors import HubError
from memcalc.sources.disk import MOST_FILES
from memcalc.sources.display_names import shown
from memcalc.sources.file_selection import RepoFile
from memcalc.sources.hub.addresses import joined, origin_of
from memcalc.sources.hub.client import HubClient
from memcalc.sources.hub.names import is_commit, is_repo_id

LISTING_CAP = 40_000_000
"""The longest answer with a list of files, bytes: as many as memcalc takes, with what the Hub says about each."""

MOST_PAGES = 1000


@dataclass(frozen=True)
class Listing:
    """A repository at one commit: its id (which may differ from the one asked for, after a move) and its files."""

    repo_id: str
    commit: str
    files: tuple[RepoFile, ...]


def ask_listing(client: HubClient, repo_id: str, revision: str) -> Listing:
    """The files of `repo_id` at `revision`, from the Hub.

    Raises:
        HubError: it refuses, or answers with what cannot be true.
    """
    url = f"{client.endpoint}/api/models/{quote(repo_id)}/revision/{quote(revision, safe='')}?blobs=true"
    info = answer_of(client, client.whole(url, LISTING_CAP).data)
    if not isinstance(info, dict):
        raise _not_data(client)
    commit, rows, repository = info.get("sha"), info.get("siblings"), info.get("id")
    if not isinstance(commit, str) or not is_commit(commit) or (is_commit(revision) and commit != revision):
        raise HubError(
            f"{client.host} did not say which commit {shown(repo_id)} is at (it says {shown(commit)}); "
            "check HF_ENDPOINT."
        )
    name = repository if isinstance(repository, str) and is_repo_id(repository) else repo_id
    files = _checked(client, rows, "rfilename") if isinstance(rows, list) else ()
    if not files or all(file.nbytes is None for file in files):
        files = _tree(client, name, commit)
    return Listing(name, commit, files)


def _tree(client: HubClient, repo_id: str, commit: str) -> tuple[RepoFile, ...]:
    """The same from the tree, page by page, where the model's own answer has no sizes (mirrors)."""
    url = f"{client.endpoint}/api/models/{quote(repo_id)}/tree/{commit}?recursive=true&expand=false"
    found: list[RepoFile] = []
    for _ in range(MOST_PAGES):
        piece = client.whole(url, LISTING_CAP)
        rows = answer_of(client, piece.data)
        if not isinstance(rows, list):
            raise _not_data(client)
        no_folders = [row for row in rows if isinstance(row, dict) and row.get("type") != "directory"]
        found.extend(_checked(client, no_folders, "path"))
        if piece.next_page is None:
            return tuple(found)
        url = joined(url, piece.next_page, "the rest of its list of files")
        if origin_of(url) != origin_of(client.endpoint):
            raise HubError(f"{client.host} sends the rest of its list of files to another host; check HF_ENDPOINT.")
        if len(found) > MOST_FILES:
            break
    raise _too_many(client)


def _checked(client: HubClient, rows: Sequence[Any], key: str) -> tuple[RepoFile, ...]:
    if len(rows) > MOST_FILES:
        raise _too_many(client)
    files = listed(rows, key)
    for file in files:
        if not file.path.isprintable():  # unpaired surrogates, which no request can carry, among others
            raise HubError(f"{client.host} lists a file whose name is no name ({shown(file.path)}); check HF_ENDPOINT.")
    return files


def listed(rows: Sequence[Any], key: str = "path") -> tuple[RepoFile, ...]:
    """The files of such rows, each path once; a large file's `size` may be its pointer's, its `lfs` is true."""
    found: dict[str, RepoFile] = {}
    for row in rows:
        if not isinstance(row, dict) or not isinstance(row.get(key), str):
            continue
        lfs = row.get("lfs")
        size = lfs.get("size") if isinstance(lfs, dict) else row.get("size")
        known = type(size) is int and 0 <= size < 2**63
        found.setdefault(row[key], RepoFile(row[key], size if known else None))
    return tuple(found.values())


def answer_of(client: HubClient, data: bytes) -> Any:
    """The JSON that the Hub answered with.

    Raises:
        HubError: it is none.
    """
    if data.count(b"{") + data.count(b"[") + data.count(b",") > 20 * MOST_FILES:
        raise _too_many(client)
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        raise _not_data(client) from None


def _not_data(client: HubClient) -> HubError:
    return HubError(
        f"{client.host} answered with a web page or something else that is not the data asked for; a login page or "
        "proxy is in between, or HF_ENDPOINT is wrong."
    )


def _too_many(client: HubClient) -> HubError:
    return HubError(
        f"{client.host} lists over {MOST_FILES:,} files or pages without end, too many for a model; check its name."
    )
