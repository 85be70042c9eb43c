"""Models on disk, as people have them."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.gguf_files import gguf, llama_gguf
from support.weights import data_bytes, header, layers, write, write_json

from memcalc import sources
from memcalc.errors import CheckpointError, ConfigError, MemcalcError
from memcalc.sources import LoadedModel
from memcalc.sources import disk as disk_module
from memcalc.sources.disk import DiskFolder

CONFIG = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2}
INDEX = "model.safetensors.index.json"


def load(path: Path, **options: Any) -> LoadedModel:
    return sources.load(str(path), kind="file", **options)


def refused(path: Path, kind: type[MemcalcError] = CheckpointError) -> str:
    with pytest.raises(kind) as caught:
        load(path)
    text = str(caught.value)
    assert "\n" not in text
    assert text.endswith((".", "?"))
    return text


def sharded(folder: Path, count: int = 2) -> Path:
    """A model folder of one layer a shard."""
    weight_map = {}
    for i in range(count):
        name = f"model-{i + 1:05d}-of-{count:05d}.safetensors"
        write(folder / name, layers(1, start=i))
        weight_map.update(dict.fromkeys(layers(1, start=i), name))
    write_json(folder / INDEX, {"metadata": {"total_size": count * data_bytes(layers(1))}, "weight_map": weight_map})
    write_json(folder / "config.json", CONFIG)
    return folder


def test_a_config_alone(tmp_path: Path) -> None:
    model = load(write_json(tmp_path / "config.json", CONFIG))
    assert (model.config, model.checkpoint, model.origin) == (CONFIG, None, "file")
    assert model.require_config() == CONFIG


def test_one_file_and_the_config_beside_it(tmp_path: Path) -> None:
    path = write(tmp_path / "model.safetensors", layers(2))
    model = load(path)
    assert model.config is None
    assert model.checkpoint is not None
    assert model.checkpoint.stored_bytes == data_bytes(layers(2))
    with pytest.raises(ConfigError, match="--generic"):
        model.require_config()
    write_json(tmp_path / "config.json", CONFIG)
    assert load(path).config == CONFIG


def test_a_sharded_folder_its_index_and_one_of_its_shards(tmp_path: Path) -> None:
    folder = sharded(tmp_path / "model")
    for path in (folder, folder / INDEX, folder / "model-00002-of-00002.safetensors"):
        model = load(path)
        assert model.checkpoint is not None
        assert model.checkpoint.stored_bytes == data_bytes(layers(2))
        assert model.checkpoint.notes == ()
        assert model.config == CONFIG


def test_other_copies_in_the_folder_are_named_and_not_counted(tmp_path: Path) -> None:
    folder = sharded(tmp_path)
    write(folder / "consolidated.safetensors", layers(2))
    write(folder / "checkpoint-7" / "model.safetensors", layers(2))
    (folder / "optimizer.pt").write_bytes(b"PK\x03\x04")
    model = load(folder)
    assert model.checkpoint is not None
    assert model.checkpoint.stored_bytes == data_bytes(layers(2))
    assert {file.path for file in model.ignored} == {
        "consolidated.safetensors",
        "checkpoint-7/model.safetensors",
        "optimizer.pt",
    }


def test_a_missing_shard(tmp_path: Path) -> None:
    folder = sharded(tmp_path)
    (folder / "model-00002-of-00002.safetensors").unlink()
    assert "model-00002-of-00002.safetensors" in refused(folder)


def test_an_index_that_leads_outside(tmp_path: Path) -> None:
    write(tmp_path / "outside.safetensors", layers(1))
    folder = sharded(tmp_path / "model")
    write_json(folder / INDEX, {"weight_map": {"a": "../outside.safetensors"}})
    assert "outside the model's folder" in refused(folder)


def test_an_adapter_names_its_base(tmp_path: Path) -> None:
    """LoRA of rank 8 on q and v of LLaMA-13B: 2 x 40 x 8 x (5120 + 5120) = 6,553,600 parameters."""
    weights = {
        f"base_model.model.model.layers.{i}.self_attn.{name}.lora_{side}.weight": ("F32", shape)
        for i in range(40)
        for name in ("q_proj", "v_proj")
        for side, shape in (("A", (8, 5120)), ("B", (5120, 8)))
    }
    write(tmp_path / "adapter_model.safetensors", weights)
    stated = {
        "peft_type": "LORA",
        "r": 8,
        "target_modules": ["q_proj", "v_proj"],
        "modules_to_save": None,
        "base_model_name_or_path": "decapoda-research/llama-13b-hf",
    }
    write_json(tmp_path / "adapter_config.json", stated)
    for path in (tmp_path, tmp_path / "adapter_config.json", tmp_path / "adapter_model.safetensors"):
        model = load(path)
        assert model.checkpoint is None
        assert model.adapter is not None
        assert model.adapter.parameters == 6_553_600
        assert (model.adapter.rank, model.adapter.targets) == (8, ("q_proj", "v_proj"))
        assert model.base is None
        with pytest.raises(ConfigError, match="decapoda-research/llama-13b-hf"):
            model.require_config()


def test_an_adapter_beside_its_base_on_disk(tmp_path: Path) -> None:
    base = sharded(tmp_path / "base")
    adapter = tmp_path / "adapter"
    write(adapter / "adapter_model.safetensors", {"a.lora_A.weight": ("F32", (8, 64))})
    write_json(adapter / "adapter_config.json", {"peft_type": "LORA", "r": 8, "base_model_name_or_path": str(base)})
    model = load(adapter)
    assert model.base is not None
    assert model.require_config() == CONFIG
    write_json(adapter / "adapter_config.json", {"peft_type": "LORA", "r": 8})
    assert load(adapter).base is None
    assert load(adapter, base=str(base)).base is not None
    write_json(adapter / "adapter_config.json", {"base_model_name_or_path": str(adapter)})
    with pytest.raises(MemcalcError, match="itself an adapter"):
        load(adapter)


def test_a_pipeline_is_the_sum_of_its_components(tmp_path: Path) -> None:
    write_json(
        tmp_path / "model_index.json",
        {
            "_class_name": "P",
            "transformer": ["diffusers", "T"],
            "text_encoder": ["transformers", "E"],
            "vae": ["diffusers", "V"],
            "scheduler": ["diffusers", "S"],
            "safety_checker": [None, None],
            "tokenizer": ["transformers", "K"],
        },
    )
    shards = [f"diffusion_pytorch_model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    write(tmp_path / "transformer" / shards[0], {"a": ("BF16", (100,))})
    write(tmp_path / "transformer" / shards[1], {"b": ("BF16", (50,))})
    index = "diffusion_pytorch_model.safetensors.index.json"
    write_json(tmp_path / "transformer" / index, {"weight_map": dict(zip("ab", shards, strict=True))})
    write_json(tmp_path / "transformer" / "config.json", {"_class_name": "T"})
    write(tmp_path / "text_encoder" / "model.safetensors", {"c": ("F16", (30,))})
    write(tmp_path / "text_encoder" / "model.fp16.safetensors", {"c": ("F16", (30,))})
    (tmp_path / "vae").mkdir()
    (tmp_path / "vae" / "diffusion_pytorch_model.bin").write_bytes(b"PK")
    write_json(tmp_path / "scheduler" / "scheduler_config.json", {})
    write(tmp_path / "whole_in_one.safetensors", {"a": ("F32", (180,))})
    model = load(tmp_path)
    counts = {part.name: part.checkpoint.parameters if part.checkpoint else None for part in model.components}
    assert counts == {"transformer": 150, "text_encoder": 30, "vae": None}
    assert model.components[0].config == {"_class_name": "T"}
    assert {file.path for file in model.ignored} == {
        "whole_in_one.safetensors",
        "text_encoder/model.fp16.safetensors",
        "vae/diffusion_pytorch_model.bin",
    }
    assert any("tokenizer" in note for note in model.notes)
    with pytest.raises(ConfigError, match="pipeline"):
        model.require_config()


def test_gguf_files(tmp_path: Path) -> None:
    data, size = gguf(*llama_gguf())
    path = tmp_path / "m-Q4_K_M.gguf"
    with path.open("wb") as file:
        file.write(data)
        file.truncate(size)
    for place in (path, tmp_path):
        model = load(place)
        assert model.checkpoint is not None
        assert model.checkpoint.format == "gguf"
        assert model.require_config()["num_hidden_layers"] == 2
    with path.open("r+b") as file:
        file.truncate(size - 100)
    assert "cut short" in refused(path)


def test_pickles_are_never_opened(tmp_path: Path) -> None:
    write_json(tmp_path / "config.json", CONFIG)
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x02cos\nsystem\n(S'touch pwned'\ntR." * 100)
    model = load(tmp_path)
    assert model.checkpoint is None
    assert model.config == CONFIG
    assert "pickles" in model.notes[0]
    assert "pickle" in refused(tmp_path / "pytorch_model.bin")


def test_custom_code_is_seen_and_not_run(tmp_path: Path) -> None:
    write_json(tmp_path / "config.json", {**CONFIG, "auto_map": {"AutoConfig": "evil.Config"}})
    (tmp_path / "evil.py").write_text("raise SystemExit(9)")
    assert load(tmp_path).custom_code


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "empty"),
        (b"[1]", "list"),
        (b"{", "not valid JSON"),
        (b'{"a": 1, "a": 2}', "twice"),
        (b"\xff\xfe{}", "UTF-8"),
        (b"<html>", "web page"),
        (b"version https://git-lfs.github.com/spec/v1", "git lfs pull"),
        (b"[" * 10**5, "nested too deeply"),
    ],
)
def test_configs_that_are_none(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    assert words in refused(path, ConfigError)


def test_what_published_configs_contain(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(b'\xef\xbb\xbf{"a": Infinity, "b": null}')
    assert load(path).config == {"a": float("inf"), "b": None}


def test_nothing_there(tmp_path: Path) -> None:
    write_json(tmp_path / "config.json", CONFIG)
    assert "'config.json'" in refused(tmp_path / "confg.json")
    (tmp_path / "empty").mkdir()
    assert "neither" in refused(tmp_path / "empty", ConfigError)
    (tmp_path / "note.txt").write_text("x")
    assert "no file that memcalc knows" in refused(tmp_path / "note.txt")
    refused(Path("a\0b"))
    refused(tmp_path / ("x" * 5000))


def test_links_in_a_circle(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    assert "symbolic links" in refused(tmp_path / "a")
    folder = sharded(tmp_path / "model")
    (folder / "model-00001-of-00002.safetensors").unlink()
    (folder / "model-00001-of-00002.safetensors").symlink_to(folder / "model-00001-of-00002.safetensors")
    (folder / "again").symlink_to(folder)
    assert "symbolic links" in refused(folder)


def test_links_into_a_store_are_followed(tmp_path: Path) -> None:
    """huggingface_hub's cache holds links to blobs."""
    blob = write(tmp_path / "blobs" / "abc", layers(1))
    folder = tmp_path / "snapshot"
    folder.mkdir()
    (folder / "model.safetensors").symlink_to(blob)
    found = load(folder).checkpoint
    assert found is not None
    assert found.stored_bytes == data_bytes(layers(1))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes on this system")
def test_a_pipe_is_no_file_and_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.safetensors")
    assert "not a regular file" in refused(tmp_path / "model.safetensors")


def test_a_file_that_is_replaced_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaced once, it is read again; replaced every time, the answer is an error and not a mixture."""
    path = write(tmp_path / "model.safetensors", layers(1))
    replacements = [1]
    read = disk_module.DiskFile.read

    def meddle(self: disk_module.DiskFile, offset: int, length: int) -> bytes:
        found = read(self, offset, length)
        if replacements and offset == 8:
            replacements.pop()
            fresh = write(tmp_path / "fresh", layers(2))
            os.replace(fresh, path)
        return found

    monkeypatch.setattr(disk_module.DiskFile, "read", meddle)
    found = load(path).checkpoint
    assert found is not None
    assert found.stored_bytes == data_bytes(layers(2))
    replacements.extend([1] * 10)
    assert "changed while it was read" in refused(path)


def test_a_folder_of_anything_is_not_walked_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_module, "MOST_FILES", 10)
    for i in range(20):
        (tmp_path / f"{i}.txt").touch()
    assert "too many files" in refused(tmp_path)


def test_truncated_weights(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(header(layers(1)))
    assert "cut short" in refused(path)


def test_reading_a_config_never_imports_the_hubs_library(tmp_path: Path) -> None:
    path = write_json(tmp_path / "config.json", CONFIG)
    code = (
        "import sys; from memcalc import sources; "
        f"sources.load({str(path)!r}, kind='file'); assert not any('huggingface' in name for name in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_folders_say_their_files_in_order(tmp_path: Path) -> None:
    sharded(tmp_path)
    assert [file.path for file in DiskFolder(tmp_path).files()] == sorted(path.name for path in tmp_path.iterdir())
