"""Models on the Hub: their config, and the headers of their weights; never the weights.

Everything goes through huggingface_hub's session, address builder, login and caches. It is imported only here and in
the modules that this one uses, inside functions, because importing it costs more than an answer.
"""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from memcalc.errors import CheckpointError, ConfigError, HubError, MemcalcError
from memcalc.sources.diffusers import is_pipeline, read_pipeline
from memcalc.sources.disk import DiskFolder, load_folder
from memcalc.sources.display_names import shown
from memcalc.sources.hub.addresses import checked_endpoint
from memcalc.sources.hub.cache import HubCache, snapshot_folder
from memcalc.sources.hub.client import HubClient, endpoint_now, token_now
from memcalc.sources.hub.deadline import DEFAULT_TIMEOUT, Deadline
from memcalc.sources.hub.errors import Missing, NoRevision
from memcalc.sources.hub.folder import HubFolder
from memcalc.sources.hub.listing import Listing, ask_listing
from memcalc.sources.hub.names import checked_revision, is_commit, parse_name
from memcalc.sources.hub.suggestions import missing_model, missing_revision
from memcalc.sources.hub.transport import Unreachable
from memcalc.sources.loaded_model import LoadedModel
from memcalc.sources.repository import read_model

Progress = Callable[[str], None]


def load_hub(  # noqa: PLR0913 (one an option of the reader)
    name: str,
    *,
    revision: str | None = None,
    token: str | None = None,
    timeout: float | Deadline = DEFAULT_TIMEOUT,
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
        timeout: seconds until everything that is asked must be answered, or a deadline that is shared.
        wanted: one weight file or GGUF type of the repository.
        endpoint, cache_folder: in place of HF_ENDPOINT and HF_ASSETS_CACHE.
        progress: is called with a line of text when reading takes longer than a second.

    Raises:
        HubError: the Hub refuses, cannot be reached, or has no such model.
        CheckpointError, ConfigError: what it has cannot be read.
        UsageError: `name` is no model's id.
    """
    _import_hub()
    address = checked_endpoint(endpoint or endpoint_now())
    asked = parse_name(name, address)
    at = checked_revision(revision or asked.revision or "main")
    cache = HubCache(asked.repo_id, address, cache_folder)
    if offline():
        return _from_cache(asked.repo_id, at, cache, wanted, "HF_HUB_OFFLINE is set")
    client = HubClient(address, token_now(token), timeout if isinstance(timeout, Deadline) else Deadline(timeout))
    client.repo_id = asked.repo_id
    try:
        listing = client.in_time(lambda: _listing(client, asked.repo_id, at, cache))
    except Unreachable as problem:
        try:
            return _from_cache(asked.repo_id, at, cache, wanted, "the Hub cannot be reached")
        except HubError:
            raise problem from None
    except NoRevision:
        raise missing_revision(client, asked.repo_id, at) from None
    except Missing as problem:
        raise missing_model(client, asked.repo_id, problem) from None
    model: LoadedModel = client.in_time(lambda: _online(client, listing, at, cache, wanted, progress))
    return model


def _import_hub() -> None:
    """Its constants are read from the environment when it is imported, which a variable that is no number stops."""
    try:
        import huggingface_hub.constants  # noqa: F401
    except (ValueError, TypeError, OSError) as problem:
        raise HubError(
            f"huggingface_hub cannot start ({shown(problem)}); check the variables of the environment that begin with "
            "HF_."
        ) from None


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
    if not client.given_up:
        clean = {path: client.hidden(data) for path, data in folder.beginnings.items()}
        cache.store(revision, listing.commit, listing.files, clean)
    notes = model.notes
    if listing.repo_id != client.repo_id:
        notes = (*notes, f"{shown(client.repo_id)} is now called {shown(listing.repo_id)}")
    return replace(model, revision=listing.commit, traffic=client.traffic, notes=notes)


def _read(folder: HubFolder, origin: str, wanted: str | None) -> LoadedModel:
    if is_pipeline(folder.files(), wanted):
        return read_pipeline(folder, origin, wanted)
    return read_model(folder, origin, wanted)


def _listing(client: HubClient, repo_id: str, revision: str, cache: HubCache) -> Listing:
    """The files at `revision`; a commit that is cached needs no request."""
    known = cache.files(revision) if is_commit(revision) else None
    if known:
        return Listing(repo_id, revision, known)
    return ask_listing(client, repo_id, revision)


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
