"""After "there is no such model": what the name may have meant."""

import json
from collections.abc import Callable
from typing import Any, TypeVar
from urllib.parse import quote

from memcalc.errors import HubError, close_matches
from memcalc.sources.display_names import shown
from memcalc.sources.hub.client import HubClient
from memcalc.sources.hub.names import is_repo_id
from memcalc.sources.hub.transport import Unreachable

T = TypeVar("T")

MOST_NAMES = 1000
"""Names that are compared with the one that was asked for."""


def missing_model(client: HubClient, repo_id: str, problem: HubError) -> HubError:
    """Say whether it is a dataset or a space, or which models have a similar name; costs up to four small requests.

    Where there is no time left for them, the error says only that there is no such model.
    """
    kind, names = _in_time(client, lambda: _looked_up(client, repo_id)) or ("", [])
    if kind:
        return HubError(f"{shown(repo_id)} is a {kind}, not a model; give the id of a model.")
    similar = close_matches(repo_id, names).rstrip("?")
    login = (
        "" if client.has_token else "; if it is private or gated, log in with `huggingface-cli login` or give --token"
    )
    return HubError(f"{problem}{similar or '; check the spelling'}{login}.")


def missing_revision(client: HubClient, repo_id: str, revision: str) -> HubError:
    """Name branches and tags that come near."""
    found = _in_time(client, lambda: _answer(client, f"{client.endpoint}/api/models/{quote(repo_id)}/refs"))
    groups = [found.get(key) for key in ("branches", "tags")] if isinstance(found, dict) else []
    names = [
        shown(row.get("name"))
        for group in groups
        if isinstance(group, list)
        for row in group[:MOST_NAMES]
        if isinstance(row, dict)
    ]
    hint = close_matches(revision, names) or "; give a branch, a tag or a full commit id."
    return HubError(f"{shown(repo_id)} has no revision {shown(revision)}{hint}")


def _in_time(client: HubClient, look: Callable[[], T]) -> T | None:
    """What `look` finds; None when the deadline is over before: help must not make anybody wait longer."""
    try:
        found: T = client.in_time(look)
    except Unreachable:
        return None
    return found


def _looked_up(client: HubClient, repo_id: str) -> tuple[str, list[str]]:
    """("dataset" or "space", []), or "" and models with a similar name."""
    for kind in ("dataset", "space"):
        if _exists(client, f"{client.endpoint}/api/{kind}s/{quote(repo_id)}"):
            return kind, []
    return "", _similar(client, repo_id)


def _exists(client: HubClient, url: str) -> bool:
    return isinstance(_answer(client, url), dict)


def _similar(client: HubClient, repo_id: str) -> list[str]:
    """Models of the same owner, and models whose name contains the longest part of this one."""
    owner, _, name = repo_id.rpartition("/")
    queries = [f"author={quote(owner)}"] if owner else []
    queries.append(f"search={quote(max(name.split('-'), key=len))}")
    found: list[str] = []
    for query in queries:
        rows = _answer(client, f"{client.endpoint}/api/models?{query}&sort=downloads&limit=100")
        rows = rows[:MOST_NAMES] if isinstance(rows, list) else []
        found.extend(row["id"] for row in rows if isinstance(row, dict) and isinstance(row.get("id"), str))
    return [name for name in dict.fromkeys(found) if is_repo_id(name)]


def _answer(client: HubClient, url: str) -> Any:
    """The JSON there; None for whatever goes wrong: help that fails must not hide the first error."""
    try:
        return json.loads(client.whole(url, 2_000_000).data)
    except Unreachable:
        if client.given_up or not client.deadline.left:
            raise
        return None
    except (HubError, ValueError, RecursionError):
        return None
