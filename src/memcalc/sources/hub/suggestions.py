"""After "there is no such model": what the name may have meant."""

import json
from typing import Any
from urllib.parse import quote

from memcalc.errors import HubError, close_matches
from memcalc.sources.display_names import shown
from memcalc.sources.hub.client import HubClient


def missing_model(client: HubClient, repo_id: str, problem: HubError) -> HubError:
    """Say whether it is a dataset or a space, or which models have a similar name; costs up to four small requests."""
    for kind in ("dataset", "space"):
        if _exists(client, f"{client.endpoint}/api/{kind}s/{quote(repo_id)}"):
            return HubError(f"{shown(repo_id)} is a {kind}, not a model; give the id of a model.")
    similar = close_matches(repo_id, _similar(client, repo_id)).rstrip("?")
    login = (
        "" if client.has_token else "; if it is private or gated, log in with `huggingface-cli login` or give --token"
    )
    return HubError(f"{problem}{similar or '; check the spelling'}{login}.")


def missing_revision(client: HubClient, repo_id: str, revision: str) -> HubError:
    """Name branches and tags that come near."""
    found = _answer(client, f"{client.endpoint}/api/models/{quote(repo_id)}/refs")
    groups = [found.get(key) for key in ("branches", "tags")] if isinstance(found, dict) else []
    names = [
        str(row.get("name")) for group in groups if isinstance(group, list) for row in group if isinstance(row, dict)
    ]
    hint = close_matches(revision, names) or "; give a branch, a tag or a full commit id."
    return HubError(f"{shown(repo_id)} has no revision {shown(revision)}{hint}")


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
        found.extend(str(row["id"]) for row in rows if isinstance(row, dict) and "id" in row) if isinstance(
            rows, list
        ) else None
    return [shown(name) for name in dict.fromkeys(found)]


def _answer(client: HubClient, url: str) -> Any:
    """The JSON there; None for whatever goes wrong: help that fails must not hide the first error."""
    try:
        return json.loads(client.whole(url, 2_000_000).data)
    except (HubError, ValueError, RecursionError):
        return None
