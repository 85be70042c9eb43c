"""Fixtures of the tests that load from a Hub on loopback."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.hub_loading import Load
from support.hub_server import Hub, running

from memcalc.sources import LoadedModel
from memcalc.sources.hub.load import load_hub


@pytest.fixture
def hub() -> Iterator[Hub]:
    with running() as server:
        yield server


@pytest.fixture
def load(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Load:
    """load_hub against the server, with caches of its own and no login."""
    for name in ("HF_TOKEN", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_TOKEN_PATH", str(tmp_path / "token"))

    def call(name: str = "org/model", **options: Any) -> LoadedModel:
        return load_hub(name, **{"endpoint": hub.url, "timeout": 10.0, "token": "", **options})

    return call
