"""`memcalc from-hub` as a whole: the command, the real client, and a Hub on this machine."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.cli_runs import refused, run
from support.gguf_files import gguf, llama_gguf
from support.http_pieces import Blob
from support.hub_server import GOOD_TOKEN, Hub, running
from support.reports import lines
from support.weights import Tensors, data_bytes, header, layers

from memcalc import HubError, InferenceSetup, ModelSpec, estimate

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}
WHOLE: Tensors = {"model.embed_tokens.weight": ("BF16", (1000, 64)), "model.norm.weight": ("BF16", (64,)), **layers(3)}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    for name in ("HF_TOKEN", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_ASSETS_CACHE", str(tmp_path / "assets"))
    monkeypatch.setenv("HF_TOKEN_PATH", str(tmp_path / "token"))
    with running() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server


def test_the_library_answers_as_the_command_does(hub: Hub) -> None:
    hub.add("org/model", {"config.json": LLAMA, "model.safetensors": weights(WHOLE)})
    spec = ModelSpec.from_pretrained("org/model")
    assert spec.name == "org/model"
    report = estimate(spec, InferenceSetup(seq_len=64))
    assert json.loads(report.to_json()) == answer("org/model", "--mode", "inference", "--seq-len", "64")
    with pytest.raises(HubError, match="org/none"):
        ModelSpec.from_pretrained("org/none")


def weights(tensors: Tensors) -> Blob:
    start = header(tensors)
    return Blob(start, len(start) + data_bytes(tensors))


def answer(*arguments: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run("from-hub", *arguments, "--json").stdout)
    return found


def test_a_model(hub: Hub) -> None:
    hub.add("org/model", {"config.json": LLAMA, "model.safetensors": weights(WHOLE)})
    found = answer("org/model", "--batch", "1", "--seq-len", "64")
    assert found["model"]["name"] == "org/model"
    assert found["model"]["parameters"]["total"] == 211_904
    assert any("stored BF16, declared BF16, loaded F32" in line for line in lines(found))
    assert answer(f"{hub.url}/org/model", "--mode", "inference")["kv_cache_bytes"] == 3 * 2 * 2 * 16 * 2 * 256
    assert json.loads(run("inspect", "org/model", "--json").stdout)["parameters"]["total"] == 211_904


def test_what_the_repository_holds_besides(hub: Hub) -> None:
    files: dict[str, Any] = {
        "config.json": LLAMA,
        "model.safetensors": weights({**WHOLE, **layers(4)}),
        "pytorch_model.bin": b"PK",
    }
    hub.add("org/model", files)
    said = lines(answer("org/model"))
    assert any("multi-token prediction" in line and "not counted" in line for line in said)
    assert any("1 other weight files" in line for line in said)


def test_a_gguf_repository(hub: Hub) -> None:
    start, size = gguf(*llama_gguf())
    hub.add("org/model-GGUF", {"model-Q4_K_M.gguf": Blob(start, size), "model-Q8_0.gguf": Blob(b"GGUF", 10**9)})
    found = answer("org/model-GGUF", "--mode", "inference")
    assert found["setup"]["engine"] == "llama.cpp"
    assert any("Q4_K_M" in line and "is used of 2 GGUF files" in line for line in lines(found))
    parts = {part["name"] for part in found["components"]["model_weights"]["parts"]}
    assert {"Q4_K weights", "Q6_K weights"} <= parts


def test_a_pipeline(hub: Hub) -> None:
    named = {"transformer": ["diffusers", "T"], "text_encoder": ["transformers", "E"], "vae": ["diffusers", "V"]}
    files: dict[str, Any] = {"model_index.json": named}
    for name in named:
        files[f"{name}/config.json"] = {}
        files[f"{name}/model.safetensors"] = weights(layers(1))
    hub.add("org/pictures", files)
    found = answer("org/pictures")
    assert found["components"]["model_weights"]["peak_bytes"] == 3 * 2 * 49_280
    assert any("out of scope" in line for line in lines(found))


def adapter(hub: Hub, base: str) -> None:
    tensors: Tensors = {
        f"base_model.model.model.layers.{i}.self_attn.q_proj.lora_{side}.weight": ("F32", shape)
        for i in range(3)
        for side, shape in (("A", (8, 64)), ("B", (64, 8)))
    }
    stated = {"peft_type": "LORA", "r": 8, "target_modules": ["q_proj"], "base_model_name_or_path": base}
    hub.add("me/adapter", {"adapter_config.json": stated, "adapter_model.safetensors": weights(tensors)})


def test_an_adapter_fetches_its_base(hub: Hub) -> None:
    hub.add("org/base", {"config.json": LLAMA, "model.safetensors": weights(WHOLE)})
    adapter(hub, "org/base")
    assert answer("me/adapter")["model"]["parameters"]["trainable"] == 3 * 8 * 128
    assert answer("me/adapter", "--mode", "inference")["model"]["parameters"]["total"] == 211_904


def test_an_adapter_whose_base_is_gone(hub: Hub) -> None:
    adapter(hub, "org/gone")
    said = refused(1, "from-hub", "me/adapter")
    assert "org/gone" in said
    assert "--base" in said


def test_an_unknown_family(hub: Hub) -> None:
    hub.add("org/model", {"config.json": LLAMA | {"model_type": "strange"}, "model.safetensors": weights(WHOLE)})
    assert "--generic" in refused(1, "from-hub", "org/model")
    assert answer("org/model", "--generic")["model"]["parameters"]["total"] == 211_904
    assert "strange" in run("inspect", "org/model").stdout


def test_gated_with_and_without_a_token(hub: Hub) -> None:
    hub.add("org/model", {"config.json": LLAMA, "model.safetensors": weights(WHOLE)}, gated=True)
    assert "token" in refused(1, "from-hub", "org/model")
    assert answer("org/model", "--token", GOOD_TOKEN)["model"]["parameters"]["total"] == 211_904


def test_names_that_are_none(hub: Hub) -> None:
    hub.add("org/model", {"config.json": LLAMA})
    assert "org/model" in refused(1, "from-hub", "org/modell")
    refused(2, "from-hub", "a/b/c")
    assert "main" in refused(1, "from-hub", "org/model", "--revision", "mian")
    assert "--timeout" in refused(2, "from-hub", "org/model", "--timeout", "soon")
