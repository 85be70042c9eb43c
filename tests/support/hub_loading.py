"""Loading from the test Hub: small repositories, and what holds for every refusal."""

from collections.abc import Callable
from typing import Any

import pytest

from memcalc.errors import HubError, MemcalcError
from memcalc.sources import LoadedModel
from support.http_pieces import Blob
from support.weights import data_bytes, header, layers

CONFIG = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2}
INDEX = "model.safetensors.index.json"
Load = Callable[..., LoadedModel]


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
