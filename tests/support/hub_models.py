"""Repositories on a local Hub, what loads them, and what a refusal must look like."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from memcalc.errors import HubError, MemcalcError
from memcalc.sources import LoadedModel
from memcalc.sources.hub.load import load_hub
from support.http_pieces import Blob
from support.hub_server import Hub, running
from support.weights import data_bytes, header, layers

CONFIG = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2}
INDEX = "model.safetensors.index.json"
Load = Callable[..., LoadedModel]


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


def weights(tensors: Any) -> Blob:
    start = header(tensors)
    return Blob(start, len(start) + data_bytes(tensors))


def sharded(count: int) -> dict[str, Any]:
    """A repository of one layer a shard, with a pickle twin and an original."""
    files: dict[str, Any] = {
        "config.json": CONFIG,
        "consolidated.safetensors": Blob(b"", 10**9),
        "pytorch_model.bin": b"PK",
    }
    weight_map = {}
    for i in range(count):
        name = f"model-{i + 1:05d}-of-{count:05d}.safetensors"
        files[name] = weights(layers(1, start=i))
        weight_map.update(dict.fromkeys(layers(1, start=i), name))
    return {**files, INDEX: {"metadata": {"total_size": count * data_bytes(layers(1))}, "weight_map": weight_map}}


def refused(load: Load, *arguments: Any, kind: type[MemcalcError] = HubError, **options: Any) -> str:
    with pytest.raises(kind) as caught:
        load(*arguments, **options)
    text = str(caught.value)
    assert text.isprintable()
    assert text.endswith((".", "?"))
    return text
