"""The Hub, over real HTTP through huggingface_hub's own session."""

import time
from pathlib import Path

import pytest
from support.gguf_files import gguf, llama_gguf
from support.http_pieces import Blob
from support.hub_models import CONFIG, Load, hub, load, refused, sharded, weights
from support.hub_server import GOOD_TOKEN, Hub
from support.weights import data_bytes, layers

from memcalc.errors import CheckpointError, MemcalcError
from memcalc.sources.hub import folder

__all__ = ["hub", "load"]


def test_headers_and_nothing_behind_them(hub: Hub, load: Load) -> None:
    hub.add("org/model", sharded(3))
    model = load()
    assert model.checkpoint is not None
    assert model.checkpoint.stored_bytes == 3 * data_bytes(layers(1))
    assert model.checkpoint.files == tuple(f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3))
    assert (model.config, model.origin, model.revision) == (CONFIG, "hub", "c" * 40)
    assert {file.path for file in model.ignored} == {"consolidated.safetensors", "pytorch_model.bin"}
    for path, sent in hub.body_bytes.items():
        if path.endswith(".safetensors"):
            name = path.rpartition("/")[2]
            assert sent <= len(hub.repos["org/model"].files[name].start), path
    assert model.traffic.requests == len(hub.seen)
    assert model.traffic.bytes_fetched == sum(hub.body_bytes.values())


def test_two_hundred_shards_in_under_forty_round_trips(hub: Hub, load: Load, tmp_path: Path) -> None:
    """Each header costs a redirect, its length and its text; they are fetched at once, over connections that stay.

    With 50 ms a request; on a machine that is busy with other work also with longer ones, where its own slowness
    weighs less.
    """
    hub.add("org/small", {"config.json": CONFIG})
    load("org/small")  # huggingface_hub's own import is not what is timed
    hub.add("org/model", sharded(200))
    took = []
    for hub.latency in (0.05, 0.05, 0.05, 0.15, 0.5):
        hub.connections, hub.busiest, before = 0, 0, len(hub.seen)
        started = time.monotonic()
        model = load(cache_folder=tmp_path / str(before))
        took.append((time.monotonic() - started) / hub.latency)
        if took[-1] < 40:
            break
    assert min(took) < 40
    assert model.checkpoint is not None
    assert len(model.checkpoint.files) == 200
    assert hub.busiest <= 40
    # Two hosts, forty at a time. The session closes a connection that idles beside twenty others, so a slow machine
    # opens a few more; a connection for each request would be six hundred.
    assert hub.connections <= 3 * 40
    seen = hub.seen[before:]
    assert len(seen) == model.traffic.requests == 3 + 3 * 200
    assert sum(request.sent for request in seen) == model.traffic.bytes_fetched
    headers = sum(request.sent for request in seen if request.path.endswith(".safetensors"))
    assert headers == model.checkpoint.header_bytes


def test_a_commit_that_is_known_costs_one_request(hub: Hub, load: Load) -> None:
    hub.add("org/model", sharded(3))
    first = load()
    again = load()
    assert again.traffic.requests == 1
    assert again.checkpoint == first.checkpoint
    assert load(revision="c" * 40).traffic.requests == 0


def test_revisions(hub: Hub, load: Load) -> None:
    hub.add("org/model", {"config.json": CONFIG}, branches={"pr/1": "d" * 40, "v1.0": "e" * 40})
    assert load(revision="pr/1").revision == "d" * 40
    assert load("https://huggingface.co/org/model/tree/v1.0").revision == "e" * 40
    assert load("org/model@v1.0").revision == "e" * 40
    text = refused(load, revision="v1.1")
    assert "no revision v1.1" in text
    assert "'v1.0'" in text


@pytest.mark.parametrize(
    "name",
    [
        "org/model",
        " org/model/ ",
        "https://huggingface.co/org/model",
        "https://hf.co/org/model?a=b#c",
        "huggingface.co/org/model/",
        "https://huggingface.co/org/model/blob/main/config.json",
        "hf://org/model",
        "{url}/org/model",
        "{url}/api/models/org/model",
    ],
)
def test_names_and_addresses(hub: Hub, load: Load, name: str) -> None:
    hub.add("org/model", {"config.json": CONFIG})
    assert load(name.format(url=hub.url)).config == CONFIG


@pytest.mark.parametrize(
    "name",
    [
        "",
        "a/b/c",
        "org/mo del",
        "../x",
        "org/model;rm",
        "https://example.com/org/model",
        "https://[",
        "https://hf.co/",
        "datasets/org/x",
        "https://huggingface.co/datasets/org/x",
        "https://huggingface.co/spaces/org/x",
        "x" * 97,
        "o--r/g",
    ],
)
def test_names_that_are_none(load: Load, hub: Hub, name: str) -> None:
    with pytest.raises(MemcalcError) as caught:
        load(name)
    assert caught.value.exit_code == 2
    assert hub.seen == []


def test_an_unknown_name_with_a_typo(hub: Hub, load: Load) -> None:
    for name in ("Qwen/Qwen2.5-7B", "Qwen/Qwen2.5-72B", "other/thing"):
        hub.add(name, {"config.json": CONFIG})
    text = refused(load, "Qwen/Qwen2.5-7b-Instrct")
    assert "did you mean 'Qwen/Qwen2.5-7B'" in text
    assert "huggingface-cli login" in text
    assert "huggingface-cli" not in refused(load, "Qwen/Qwen2.5-7b-Instrct", token=GOOD_TOKEN)


def test_datasets_and_spaces(hub: Hub, load: Load) -> None:
    hub.others = {"org/data": "dataset", "org/demo": "space"}
    assert "is a dataset, not a model" in refused(load, "org/data")
    assert "is a space, not a model" in refused(load, "org/demo")


def test_gated_private_and_disabled(hub: Hub, load: Load) -> None:
    hub.add("org/model", sharded(2), gated=True)
    hub.add("org/secret", sharded(2), private=True)
    hub.add("org/gone", sharded(2), disabled=True)
    without = refused(load)
    assert "gated" in without
    assert "huggingface-cli login" in without
    assert f"{hub.url}/org/model" in without
    assert "has no access yet" in refused(load, token="hf_other")
    assert load(token=GOOD_TOKEN).checkpoint is not None
    assert "private or gated" in refused(load, "org/secret")
    assert load("org/secret", token=f" {GOOD_TOKEN}\n").checkpoint is not None
    assert "disabled" in refused(load, "org/gone")
    assert "refuses the token" in refused(load, token="hf_broken")


def test_the_token_goes_to_the_hub_only(hub: Hub, load: Load) -> None:
    hub.add("org/model", sharded(2), gated=True)
    load(token=GOOD_TOKEN)
    assert {seen.authorization for seen in hub.seen if not seen.path.startswith("/cdn")} == {f"Bearer {GOOD_TOKEN}"}
    assert {seen.authorization for seen in hub.seen if seen.path.startswith("/cdn")} == {None}


def test_login_and_environment(hub: Hub, load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add("org/model", {"config.json": CONFIG}, private=True)
    monkeypatch.setenv("HF_TOKEN", GOOD_TOKEN)
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    assert load(token=None, endpoint=None).config == CONFIG


def test_a_moved_repository(hub: Hub, load: Load) -> None:
    hub.add("new/model", {"config.json": CONFIG})
    hub.add("org/model", {}, moved_to="new/model")
    model = load()
    assert model.name == "new/model"
    assert "org/model is now called new/model" in model.notes


def test_a_mirror_that_lists_files_page_by_page(hub: Hub, load: Load) -> None:
    hub.add("org/model", sharded(5), sizes_in_info=False)
    hub.page = 3
    found = load().checkpoint
    assert found is not None
    assert len(found.files) == 5
    assert sum("/tree/" in seen.path for seen in hub.seen) == 3


def test_a_file_without_redirects(hub: Hub, load: Load) -> None:
    hub.redirects = False
    hub.add("org/model", {"config.json": CONFIG, "model.safetensors": weights(layers(2))})
    assert load().traffic.requests == 4


def test_gguf_only(hub: Hub, load: Load) -> None:
    start, size = gguf(*llama_gguf())
    hub.add("org/model", {"m-Q4_K_M.gguf": Blob(start, size), "m-Q8_0.gguf": Blob(start, size)})
    model = load()
    assert model.checkpoint is not None
    assert model.checkpoint.files == ("m-Q4_K_M.gguf",)
    assert model.require_config()["hidden_size"] == 512
    assert load(wanted="Q8_0").checkpoint.files == ("m-Q8_0.gguf",)  # type: ignore[union-attr]
    assert "no weights called Q3_K" in refused(load, wanted="Q3_K", kind=CheckpointError)


def test_pickles_only(hub: Hub, load: Load) -> None:
    hub.add("org/model", {"config.json": CONFIG, "pytorch_model.bin": Blob(b"PK", 10**10)})
    model = load()
    assert model.checkpoint is None
    assert "pickles" in model.notes[0]
    assert not any("pytorch_model.bin" in seen.path for seen in hub.seen)


def test_a_pipeline(hub: Hub, load: Load) -> None:
    named = {"unet": ["diffusers", "U"], "text_encoder": ["transformers", "T"], "scheduler": ["diffusers", "S"]}
    hub.add(
        "org/model",
        {
            "model_index.json": named,
            "unet/config.json": {},
            "unet/diffusion_pytorch_model.safetensors": weights({"a": ("F16", (10,))}),
            "text_encoder/config.json": {},
            "text_encoder/model.safetensors": weights({"b": ("F16", (5,))}),
        },
    )
    found = {part.name: part.checkpoint.parameters for part in load().components if part.checkpoint}
    assert found == {"unet": 10, "text_encoder": 5}


def test_progress_only_after_a_second(hub: Hub, load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    assert folder.QUIET == 1.0
    hub.add("org/model", sharded(60))
    lines: list[str] = []
    monkeypatch.setattr(folder, "QUIET", 60.0)
    load(progress=lines.append)
    assert lines == []
    monkeypatch.setattr(folder, "QUIET", 0.1)
    hub.add("org/slow", sharded(60))
    hub.latency = 0.15
    load("org/slow", progress=lines.append)
    assert lines
    assert all(line.startswith("org/slow: ") and " of 60 " in line for line in lines)
