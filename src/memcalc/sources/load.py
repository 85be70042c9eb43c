"""The one door to models outside: a path on disk or a name on the Hub becomes a LoadedModel."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from memcalc.errors import ConfigError, HubError, MemcalcError, UsageError
from memcalc.sources.disk import load_path
from memcalc.sources.display_names import shown
from memcalc.sources.loaded_model import LoadedModel

if TYPE_CHECKING:
    from memcalc.sources.hub.deadline import Deadline

Kind = Literal["file", "hub"]


def load(  # noqa: PLR0913 (one an option of the reader)
    name_or_path: str,
    *,
    kind: Kind,
    revision: str | None = None,
    token: str | None = None,
    timeout: float = 30.0,
    weights: str | None = None,
    base: str | None = None,
    adapter: str | None = None,
    progress: Callable[[str], None] | None = None,
) -> LoadedModel:
    """Read what a model is made of; its weights are never read, and nothing of it is run.

    Args:
        name_or_path: a path for "file", an id or page address for "hub".
        kind: where to look.
        revision, token, timeout: for the Hub, which has answered everything after `timeout` seconds or is given up.
        weights: one weight file or GGUF type, where a repository has several.
        base: an adapter's base model, in place of the one that it names.
        adapter: an adapter to put on the model: its folder, its file, or its name on the Hub.
        progress: is called with a line of text when the Hub takes longer than a second.

    Raises:
        MemcalcError: one sentence for the user.
    """
    where = _Hub(token, timeout, progress)
    if adapter is not None:
        return _adapted(where.read(name_or_path, kind, revision, weights), adapter, base, where)
    model = where.read(name_or_path, kind, revision, weights)
    if model.adapter is None:
        if base is not None:
            raise UsageError(
                f"--base names the model that an adapter needs, and {shown(model.name)} is none; leave it out."
            )
        return model
    return replace(model, base=_base(model, kind, base, where))


def _adapted(base: LoadedModel, adapter: str, other: str | None, where: _Hub) -> LoadedModel:
    """`base` with an adapter on it."""
    if other is not None:
        raise UsageError("--base names an adapter's base model, and --adapter an adapter for MODEL; leave one out.")
    found = where.read(adapter, "file" if os.path.exists(adapter) or "/" not in adapter else "hub")
    if found.unfit:
        raise ConfigError(f"{shown(found.name)} {found.unfit}")
    if found.adapter is None:
        raise UsageError(f"--adapter names {shown(found.name)}, which holds no adapter that memcalc knows.")
    if base.adapter is not None:
        raise UsageError(f"{shown(base.name)} is an adapter itself; give the base model, and one --adapter.")
    return replace(found, base=base, name=base.name)


class _Hub:
    """How the Hub is asked: with which token, and by when it must have answered everything, the base model included."""

    def __init__(self, token: str | None, timeout: float, progress: Callable[[str], None] | None) -> None:
        self.token, self.timeout, self.progress = token, timeout, progress
        self.deadline: Deadline | None = None

    def read(self, name: str, kind: Kind, revision: str | None = None, weights: str | None = None) -> LoadedModel:
        """The model at a path, or of that name on the Hub."""
        if not name.strip():
            raise UsageError("The model's name is empty: give a path, or a name of the Hub such as ORG/NAME.")
        if kind == "file":
            return load_path(Path(name), weights)
        # These bring huggingface_hub, which `from-file` must not pay for.
        from memcalc.sources.hub.deadline import Deadline
        from memcalc.sources.hub.load import load_hub

        self.deadline = self.deadline or Deadline(self.timeout)
        return load_hub(
            name, revision=revision, token=self.token, timeout=self.deadline, wanted=weights, progress=self.progress
        )


def _base(model: LoadedModel, kind: Kind, given: str | None, where: _Hub) -> LoadedModel | None:
    """The model that an adapter needs.

    A local adapter may name a folder; the Hub is asked only when the user gives the base. An adapter from the Hub names
    a model there: a path in its config is somebody else's disk, and is not looked at.
    """
    name = given or (model.adapter.base_model if model.adapter else None)
    local = name is not None and os.path.exists(name) and (given is not None or kind == "file")
    if name is None or (kind == "file" and given is None and not local):
        return None
    try:
        found = where.read(name, "file" if local else "hub")
    except MemcalcError as problem:
        raise HubError(
            f"{shown(model.name)} is an adapter for {shown(name)}, which cannot be read ({str(problem).rstrip('.')}); "
            "give the base model with --base, or its size with --params."
        ) from None
    if found.adapter is not None:
        raise HubError(f"{shown(model.name)} is an adapter for {shown(name)}, itself an adapter; give --base.")
    return found
