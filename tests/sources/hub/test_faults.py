"""What goes wrong between here and the Hub: bounded, one sentence, and nothing read that was not asked for."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from support.http_pieces import Blob
from support.hub_models import CONFIG, INDEX, Load, hub, load, refused, sharded, weights
from support.hub_server import Hub
from support.weights import data_bytes, header, layers

from memcalc import sources
from memcalc.errors import CheckpointError, HubError, MemcalcError
from memcalc.sources.hub import client as hub_client

__all__ = ["hub", "load"]


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_client, "PAUSES", (0.0, 0.01, 0.02))


def one(hub: Hub) -> None:
    hub.add("org/model", {"config.json": CONFIG, "model.safetensors": weights(layers(2))})


def test_busy_and_broken_servers_are_asked_again(hub: Hub, load: Load) -> None:
    one(hub)
    hub.faults = {"/api/models": ["status:503", "status:429,0"], "config.json": ["drop"], "cdn": ["status:502"]}
    assert load().checkpoint is not None


def test_but_not_for_ever(hub: Hub, load: Load) -> None:
    one(hub)
    hub.faults = {"/api/models": ["status:503!"]}
    assert "out of order (503)" in refused(load)
    assert len(hub.seen) == 3
    hub.faults = {"cdn": ["drop!"]}
    assert "broke" in refused(load)


def test_a_limit_that_lasts_longer_than_the_timeout(hub: Hub, load: Load) -> None:
    one(hub)
    hub.faults = {"/api/models": ["status:429,300!"]}
    started = time.monotonic()
    assert "300 seconds" in refused(load)
    assert time.monotonic() - started < 2
    hub.faults = {"/api/models": ["status:429,1"]}
    assert load().config == CONFIG


def test_a_server_that_never_answers(hub: Hub, load: Load) -> None:
    one(hub)
    hub.faults = {"/api/models": ["hang!"]}
    started = time.monotonic()
    assert "within 0.3 seconds" in refused(load, timeout=0.3)
    assert time.monotonic() - started < 2


def test_a_server_that_drips(hub: Hub, load: Load) -> None:
    one(hub)
    hub.faults = {"config.json": ["drip!"]}
    started = time.monotonic()
    assert "within 0.3 seconds" in refused(load, timeout=0.3)
    assert time.monotonic() - started < 2


def test_a_server_that_ignores_ranges_and_sends_five_gigabytes(hub: Hub, load: Load) -> None:
    start = header(layers(2))
    hub.add("org/model", {"config.json": CONFIG, "model.safetensors": Blob(start, 5 * 10**9)})
    hub.faults = {"model.safetensors": ["ignore-ranges:5000000000!"]}
    model = load()
    assert model.checkpoint is not None
    assert model.checkpoint.header_bytes == len(start)
    assert model.traffic.bytes_fetched < 1_000_000


def test_a_small_file_that_is_five_gigabytes(hub: Hub, load: Load) -> None:
    hub.add("org/model", {"config.json": CONFIG})
    hub.faults = {"config.json": ["ignore-ranges:5000000000!"]}
    assert "5,000,000,000 bytes where a small file is due" in refused(load)


def test_truncated_bodies(hub: Hub, load: Load) -> None:
    one(hub)
    hub.faults = {"cdn": ["truncate"], "config.json": ["truncate"]}
    assert load().checkpoint is not None
    hub.add("org/other", {"config.json": CONFIG})
    hub.faults = {"config.json": ["truncate!"]}
    assert "broke" in refused(load, "org/other")


def test_a_login_page_instead_of_data(hub: Hub, load: Load) -> None:
    one(hub)
    hub.faults = {"/api/models": ["html!"]}
    assert "web page" in refused(load)
    hub.faults = {"config.json": ["html!"]}
    assert "web page" in refused(load, kind=MemcalcError)
    hub.faults = {"cdn": ["html!"]}
    assert "web page" in refused(load, kind=CheckpointError)


def test_files_that_are_not_what_they_are_called(hub: Hub, load: Load) -> None:
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 99\n"
    hub.add("org/model", {"config.json": CONFIG, "model.safetensors": pointer})
    assert "Git LFS pointer" in refused(load, kind=CheckpointError)
    hub.add("org/zip", {"config.json": CONFIG, "model.safetensors": Blob(b"PK\x03\x04" + b"\x14" * 60, 10**9)})
    assert "torch.save" in refused(load, "org/zip", kind=CheckpointError)
    assert max(hub.body_bytes.values()) < 1000


def test_indexes_that_lead_nowhere(hub: Hub, load: Load) -> None:
    files = sharded(2)
    del files["model-00002-of-00002.safetensors"]
    hub.add("org/model", files)
    assert "model-00002-of-00002.safetensors" in refused(load, kind=CheckpointError)
    hub.add("org/other", {"config.json": CONFIG, INDEX: {"weight_map": {"a": "../../etc/passwd"}}})
    assert "outside" in refused(load, "org/other", kind=CheckpointError)
    assert not any("passwd" in seen.path for seen in hub.seen)


def test_an_empty_repository(hub: Hub, load: Load) -> None:
    hub.add("org/model", {"README.md": b"x"})
    assert "neither a config.json nor weights" in refused(load, kind=MemcalcError)


def test_no_network(load: Load) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    assert "no connection" in refused(load, endpoint=f"http://127.0.0.1:{port}")
    for wrong in ("127.0.0.1", "ftp://x", "http://[", "http://a b"):
        refused(load, endpoint=wrong)


def test_a_proxy_that_hangs(hub: Hub, load: Load, tmp_path: Path) -> None:
    """The proxy of the environment takes the connection and says nothing: --timeout ends it."""
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        proxy.listen(5)
        address = f"http://127.0.0.1:{proxy.getsockname()[1]}"
        code = (
            "from memcalc import errors, sources\n"
            "try: sources.load('org/model', kind='hub', timeout=0.5)\n"
            "except errors.HubError as problem: print(problem)"
        )
        environment = {**os.environ, "HF_ENDPOINT": "http://hub.example", "HTTP_PROXY": address, "http_proxy": address}
        environment |= {"HF_HOME": str(tmp_path / "home"), "NO_PROXY": "", "no_proxy": ""}
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=30)
    assert "did not answer within 0.5 seconds" in done.stdout


def test_a_warm_cache_answers_without_a_network(hub: Hub, load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add("org/model", sharded(3))
    online = load()
    seen = len(hub.seen)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    offline = load()
    assert offline.checkpoint == online.checkpoint
    assert (offline.origin, offline.revision) == ("cache", "c" * 40)
    assert "HF_HUB_OFFLINE is set; answered from the cache" in offline.notes
    assert "not in the cache" in refused(load, "org/never")
    assert "not in the cache" in refused(load, revision="v9")
    assert len(hub.seen) == seen
    monkeypatch.delenv("HF_HUB_OFFLINE")
    hub.faults = {"": ["drop!"]}
    unreachable = load()
    assert unreachable.checkpoint == online.checkpoint
    assert "cannot be reached" in unreachable.notes[-1]
    refused(load, endpoint="http://127.0.0.1:9")  # another Hub: what this one said is not its answer


def snapshot(home: Path, files: dict[str, bytes]) -> None:
    """What huggingface_hub's downloads leave behind: links into a store of blobs."""
    root = home / "hub" / "models--org--model"
    (root / "refs").mkdir(parents=True)
    (root / "refs" / "main").write_text("a" * 40)
    (root / "snapshots" / ("a" * 40)).mkdir(parents=True)
    (root / "blobs").mkdir()
    for i, (name, data) in enumerate(files.items()):
        (root / "blobs" / str(i)).write_bytes(data)
        (root / "snapshots" / ("a" * 40) / name).symlink_to(root / "blobs" / str(i))


def test_files_that_transformers_downloaded_serve_as_a_cache(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    data = header(layers(1)) + bytes(data_bytes(layers(1)))
    snapshot(tmp_path / "home", {"config.json": b'{"a": 1}', "model.safetensors": data})
    model = load()
    assert model.checkpoint is not None
    assert (model.name, model.origin, model.config) == ("org/model", "cache", {"a": 1})


def test_a_downloaded_config_alone_is_an_answer(load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    snapshot(tmp_path / "home", {"config.json": b'{"a": 1}', INDEX: b'{"weight_map": {"w": "m-1.safetensors"}}'})
    model = load()
    assert (model.config, model.checkpoint) == ({"a": 1}, None)
    assert "missing" in model.notes[0]


def test_a_spoilt_cache_is_read_anew(hub: Hub, load: Load, tmp_path: Path) -> None:
    one(hub)
    first = load()
    for path in (tmp_path / "home").rglob("*"):
        if path.is_file() and path.name not in ("files.json", "refs.json"):
            path.write_bytes(b"\0" * path.stat().st_size)
    assert load().checkpoint == first.checkpoint
    assert load().traffic.requests == 1


def test_a_cache_that_cannot_be_written(hub: Hub, load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one(hub)
    (tmp_path / "file").touch()
    monkeypatch.setenv("HF_HOME", str(tmp_path / "file"))
    assert load().checkpoint is not None


def test_an_adapter_asks_for_its_base(hub: Hub, load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    adapter: dict[str, Any] = {
        "adapter_config.json": {"peft_type": "LORA", "r": 8, "base_model_name_or_path": "org/base"},
        "adapter_model.safetensors": weights({"a.lora_A.weight": ("F32", (8, 64))}),
    }
    hub.add("org/model", adapter)
    with pytest.raises(HubError) as caught:
        sources.load("org/model", kind="hub")
    assert "org/model is an adapter for org/base, which cannot be read" in str(caught.value)
    assert "--base" in str(caught.value)
    hub.add("org/base", {"config.json": CONFIG, "model.safetensors": weights(layers(2))})
    model = sources.load("org/model", kind="hub")
    assert model.require_config() == CONFIG
    assert model.adapter is not None
    assert model.adapter.parameters == 512
    assert model.checkpoint is None
    hub.add("org/loop", {**adapter, "adapter_config.json": {"base_model_name_or_path": "org/loop"}})
    with pytest.raises(HubError, match="itself an adapter"):
        sources.load("org/loop", kind="hub")
    hub.add("org/path", {**adapter, "adapter_config.json": {"base_model_name_or_path": "/etc"}})
    with pytest.raises(HubError, match="--base"):
        sources.load("org/path", kind="hub")


def test_the_environment_of_a_fresh_process(hub: Hub, load: Load, tmp_path: Path) -> None:
    """HF_ENDPOINT and HF_HUB_OFFLINE as users set them; stdout stays the answer's."""
    one(hub)
    code = "from memcalc import sources; m = sources.load('org/model', kind='hub'); print(m.origin)"
    environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "fresh")}
    for extra, origin in (({}, "hub"), ({"HF_HUB_OFFLINE": "1"}, "cache")):
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**environment, **extra},
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        assert done.stdout == f"{origin}\n"
        assert done.stderr == ""
