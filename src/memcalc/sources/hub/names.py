"""What people type for a model: an id, an id with a revision, or the address of its page."""

import re
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

from memcalc.errors import UsageError
from memcalc.sources.display_names import shown
from memcalc.sources.hub.addresses import without_login

# Hosts whose pages are the Hub's; a page of HF_ENDPOINT's host counts as well.
HOSTS = ("huggingface.co", "www.huggingface.co", "hf.co")

# One or two parts of letters, digits, `-`, `_`, `.`; the Hub allows 96 characters.
_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9_][\w.-]*)?", re.ASCII)

_SHA = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")

_OTHER_KINDS = {
    "datasets": "dataset",
    "spaces": "space",
    "collections": "collection",
    "papers": "paper",
    "docs": "page",
}


@dataclass(frozen=True)
class HubName:
    """A repository's id, and the revision that the address names (None when it names none)."""

    repo_id: str
    revision: str | None = None


def is_repo_id(name: str) -> bool:
    """Whether `name` follows the Hub's grammar of ids; nothing else becomes part of an address or of a path."""
    return len(name) <= 96 and _ID.fullmatch(name) is not None and "--" not in name and ".." not in name


def is_commit(revision: object) -> bool:
    """Whether `revision` is a full commit id; nothing else becomes the name of a folder."""
    return isinstance(revision, str) and _SHA.fullmatch(revision) is not None


def checked_revision(revision: str) -> str:
    """The branch, tag or commit that a user gives.

    Raises:
        UsageError: git has no such names.
    """
    if not revision.isprintable() or " " in revision or len(revision) > 255:
        raise UsageError(f"{shown(revision)} is no revision; give a branch, a tag or a full commit id.")
    return revision


def parse_name(text: str, endpoint: str = "") -> HubName:
    """The model that `text` names.

    Args:
        text: "org/name", "org/name@revision", "hf://org/name", or the address of a page on the Hub.
        endpoint: the Hub's own address, whose host is accepted as well.

    Raises:
        UsageError: it names no model.
    """
    stripped = text.strip()
    plain = stripped.removeprefix("hf://").removeprefix("models/")
    if "://" in plain or plain.split("/")[0].lower() in HOSTS:
        return _from_address(plain if "://" in plain else f"https://{plain}", endpoint)
    kind = _OTHER_KINDS.get(plain.split("/")[0])
    if kind and plain.count("/") == 2:
        raise UsageError(f"{shown(text)} is a {kind}, not a model; give the id of a model, such as org/name.")
    name, _, revision = plain.rstrip("/").partition("@")
    return HubName(_checked(name, text), revision or None)


def _from_address(address: str, endpoint: str) -> HubName:
    shown_address = shown(without_login(address))
    try:
        parts = urlsplit(address)
        host = (parts.hostname or "").lower()
    except ValueError:
        raise UsageError(f"{shown_address} is no address; give the model's id, such as org/name.") from None
    if host not in HOSTS and host != (urlsplit(endpoint).hostname or ""):
        raise UsageError(f"{shown_address} is not a page of the Hub; give the model's id, such as org/name.")
    path = [part for part in parts.path.split("/") if part]
    if path and path[0] in _OTHER_KINDS:
        raise UsageError(f"{shown_address} is a {_OTHER_KINDS[path[0]]}, not a model; give a model's id or page.")
    if path[:2] == ["api", "models"]:
        path = path[2:]
    at = next(
        (i for i, part in enumerate(path) if part in ("tree", "blob", "resolve", "raw", "commit", "revision")), None
    )
    name = "/".join(path[:at] if at is not None else path[:2])
    revision = unquote(path[at + 1]) if at is not None and len(path) > at + 1 else None
    return HubName(_checked(name, without_login(address)), revision)


def _checked(name: str, text: str) -> str:
    if not name:
        raise UsageError("The name is empty; give the model's id, such as org/name.")
    if not is_repo_id(name):
        raise UsageError(
            f"{shown(text)} is not a model's id; ids look like org/name, and files on disk are for from-file and "
            "inspect, where they exist."
        )
    return name
