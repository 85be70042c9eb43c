"""Which files of a repository are the model."""

import pytest

from memcalc.sources.checkpoint.shard_index import is_inside
from memcalc.sources.file_selection import Choice, RepoFile, choose, gguf_type, ignored_files, looks_like_weights

SHARDS = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
INDEX = "model.safetensors.index.json"


def chosen(*paths: str, wanted: str | None = None) -> Choice:
    return choose([RepoFile(path, 100) for path in ("config.json", "README.md", *paths)], wanted)


def reasons(used: list[str], *paths: str) -> dict[str, str]:
    files = [RepoFile(path, 100) for path in paths]
    return {file.path: file.reason for file in ignored_files(files, used, choose(files))}


def test_an_index_beats_everything_beside_it() -> None:
    """Mistral-7B-v0.3 holds its shards and the same weights once more: 13.50 GiB, not 27.00."""
    choice = chosen(*SHARDS, "consolidated.safetensors", INDEX)
    assert (choice.format, choice.index, choice.weights) == ("safetensors", INDEX, ())
    assert reasons(SHARDS, *SHARDS, "consolidated.safetensors", INDEX) == {
        "consolidated.safetensors": "the original format of the same weights"
    }


@pytest.mark.parametrize(
    ("path", "word"),
    [
        ("original/consolidated.00.pth", "original"),
        ("original/model.safetensors", "original"),
        ("metal/model.bin", "Apple"),
        ("onnx/model.onnx", "runtime"),
        ("onnx/model.onnx_data", "runtime"),
        ("openvino/openvino_model.bin", "runtime"),
        ("model.fp16.safetensors", "precision"),
        ("diffusion_pytorch_model.non_ema.safetensors", "precision"),
        ("pytorch_model.bin", "pickle"),
        ("pytorch_model-00001-of-00002.bin", "pickle"),
        ("tf_model.h5", "framework"),
        ("flax_model.msgpack", "framework"),
        ("rust_model.ot", "framework"),
        ("optimizer.pt", "training state"),
        ("optimizer.safetensors", "training state"),
        ("rng_state_0.pth", "training state"),
        ("scheduler.pt", "training state"),
        ("training_args.bin", "training state"),
        ("global_step100/mp_rank_00_model_states.pt", "checkpoint"),
        ("zero_pp_rank_0_mp_rank_00_optim_states.pt", "training state"),
        ("checkpoint-100/model.safetensors", "checkpoint"),
        ("adapter_model.safetensors", "adapter"),
        ("model-q4_k_m.gguf", "GGUF"),
        ("mmproj-model-f16.gguf", "projector"),
        ("1_Dense/model.safetensors", "subfolder"),
    ],
)
def test_files_that_are_not_the_model(path: str, word: str) -> None:
    assert chosen("model.safetensors", path).weights == ("model.safetensors",)
    assert word in reasons(["model.safetensors"], "model.safetensors", path)[path]


def test_a_fine_tuning_folder_is_its_model() -> None:
    """Llama-3.1-8B after training: 14.96 GiB of model in a folder of 74.79."""
    others = (
        "optimizer.pt",
        "checkpoint-100/model-00001-of-00004.safetensors",
        "checkpoint-100/optimizer.pt",
        "scheduler.pt",
    )
    assert chosen(*SHARDS, INDEX, *others).index == INDEX
    assert set(reasons(SHARDS, *SHARDS, INDEX, *others)) == set(others)


def test_shards_without_an_index() -> None:
    assert chosen(*SHARDS).weights == tuple(SHARDS)
    incomplete = chosen(*SHARDS[:2])
    assert "only 2 of 3" in incomplete.notes[0]
    assert chosen(*SHARDS[:1], "whole.safetensors").weights == ("whole.safetensors",)


def test_index_and_single_file_both_there() -> None:
    assert "both there" in chosen(*SHARDS, INDEX, "model.safetensors").notes[0]


def test_what_is_used_when_nothing_better_is_there() -> None:
    assert chosen("gptq_model-4bit-128g.safetensors").weights == ("gptq_model-4bit-128g.safetensors",)
    assert chosen("consolidated.safetensors").weights == ("consolidated.safetensors",)
    assert "no model.safetensors" in chosen("consolidated.safetensors").notes[0]
    assert chosen("model.fp16.safetensors").weights == ("model.fp16.safetensors",)
    assert chosen("adapter_model.safetensors").format == ""
    assert chosen("optimizer.safetensors").format == ""


def test_pickles_are_only_named() -> None:
    both = ("pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin")
    assert (chosen(*both).format, chosen(*both).weights) == ("pickle", both)
    assert chosen("training_args.bin").format == ""


def test_one_of_many_gguf_files() -> None:
    files = (
        "m-Q2_K.gguf",
        "m-Q4_K_M.gguf",
        "m-Q8_0-00001-of-00002.gguf",
        "m-Q8_0-00002-of-00002.gguf",
        "mmproj-f16.gguf",
    )
    choice = chosen(*files)
    assert (choice.format, choice.weights) == ("gguf", ("m-Q4_K_M.gguf",))
    assert "Q2_K, Q8_0" in choice.notes[0]
    assert "mmproj-f16.gguf, which a run with images loads as well" in choice.notes[1]
    assert chosen(*files, wanted="q8_0").weights == files[2:4]
    assert chosen(*files, wanted="m-Q2_K.gguf").weights == ("m-Q2_K.gguf",)
    assert chosen(*files, wanted="Q5_K_M").format == ""
    assert chosen("only.gguf").notes == ()


def test_a_file_by_name() -> None:
    assert chosen("model.safetensors", "model.fp16.safetensors", wanted="model.fp16.safetensors").weights == (
        "model.fp16.safetensors",
    )
    assert chosen(*SHARDS, wanted=SHARDS[1]).weights == tuple(SHARDS)
    assert (
        chosen(*SHARDS, "other.safetensors.index.json", wanted="other.safetensors.index.json").index
        == "other.safetensors.index.json"
    )


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("Llama-3-Q4_K_M.gguf", "Q4_K_M"),
        ("a.IQ2_XXS.gguf", "IQ2_XXS"),
        ("q8_0/b-00001-of-00003.gguf", "Q8_0"),
        ("Qwen3-8B-f16.gguf", "F16"),
        ("x-UD-Q3_K_XL.gguf", "UD-Q3_K_XL"),
        ("m-MXFP4.gguf", "MXFP4"),
        ("qwen.gguf", ""),
    ],
)
def test_gguf_types_in_names(path: str, kind: str) -> None:
    assert gguf_type(path) == kind


def test_what_looks_like_weights() -> None:
    assert looks_like_weights("a/b.SAFETENSORS")
    assert not looks_like_weights("tokenizer.json")
    assert is_inside("sub/model.safetensors")
