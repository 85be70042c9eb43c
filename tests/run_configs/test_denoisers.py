"""Trainers of diffusion models: what the facts of whole files do not show."""

from pathlib import Path

import pytest
from support.cli_runs import answer, assumes, refused
from support.paths import DATA

from memcalc.errors import ConfigError
from memcalc.run_configs.read import read

FOLDER = DATA / "run_configs"
FLUX = str(DATA.parents[1] / "examples" / "flux.1-dev")
LINE = ["accelerate", "launch", "flux_train_network.py", "--pretrained_model_name_or_path=m", "--mixed_precision=bf16"]


def _written(folder: Path, name: str, text: str) -> str:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_a_dataset_file_says_the_largest_batch_and_resolution(tmp_path: Path) -> None:
    sets = '[[datasets]]\nresolution = 512\nbatch_size = 4\n[[datasets.subsets]]\nimage_dir = "a"\n'
    sets += '[[datasets]]\nresolution = [1024, 768]\n[[datasets.subsets]]\nimage_dir = "b"\n'
    found = read([_written(tmp_path, "sets.toml", sets)], [*LINE, "--dataset_config=sets.toml"])
    assert (found.setup["batch"], found.setup["width"], found.setup["height"]) == (4, 1024, 768)


def test_options_of_a_line_override_those_of_its_toml() -> None:
    found = read([str(FOLDER / "kohya" / "flux_lora.toml")], [*LINE, "--network_dim=4"])
    assert found.setup["lora_rank"] == 4


def test_a_toml_that_a_line_names_is_asked_for() -> None:
    found = read([], [*LINE, "--config_file=run.toml", "--resolution=512"])
    assert any("run.toml" in sentence for sentence in found.asked)


def test_what_waits_on_the_host_is_told() -> None:
    found = read([], [*LINE, "--blocks_to_swap=18", "--resolution=512"])
    assert any("blocks_to_swap" in sentence for sentence in found.lacks)


@pytest.mark.parametrize("words", [["--optimizer_type=nobody"], ["--resolution=wide"], ["--mixed_precision=bf17"]])
def test_wrong_values_are_refused(words: list[str]) -> None:
    with pytest.raises(ConfigError):
        read([], [*LINE, "--resolution=512", *words])


def test_accelerates_precision_counts_for_them_too() -> None:
    found = read([str(FOLDER / "accelerate" / "fsdp1.yaml")], [*LINE[:-1], "--resolution=512"])
    assert found.setup["precision"] == "mixed-bf16"


@pytest.mark.parametrize(
    "name", ["kohya/flux_lora.toml", "ai_toolkit/flux.yaml", "simple_tuner/config.json", "one_trainer/flux.json"]
)
def test_a_file_is_estimated(name: str) -> None:
    found = answer("from-config", str(FOLDER / name), "--model", FLUX)
    assert found["model"]["parameters"]["trainable"] > 0
    assert found["setup"]["trainer"] == "diffusers"
    assert assumes(found, "read as a run of")


def test_what_a_file_runs_on_the_gpu_must_be_there() -> None:
    assert "autoencoder" in refused(2, "from-config", str(FOLDER / "diffusers/flux_lora.sh"), "--model", FLUX)


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("train_dreambooth.py", {"batch": 4, "resolution": 512, "cache_text_embeddings": False}),
        ("train_dreambooth.py --pre_compute_text_embeddings", {"cache_text_embeddings": True}),
        ("train_dreambooth_sd3.py", {"batch": 4, "resolution": 512, "max_sequence_length": 77}),
        ("train_dreambooth_flux.py", {"max_sequence_length": 77}),
        ("train_dreambooth_lora_flux.py --max_sequence_length=256", {"max_sequence_length": 256}),
        ("train_dreambooth_lora_sdxl.py", {"resolution": 1024, "lora_rank": 4}),
        ("train_controlnet_sdxl.py", {"batch": 4, "resolution": 512}),
        ("train_controlnet_flux.py --use_adafactor", {"optimizer": "adafactor-hf"}),
        ("train_text_to_image_lora_sdxl.py", {"batch": 16, "resolution": 1024}),
        ("textual_inversion_sdxl.py", {"batch": 16, "resolution": 512}),
    ],
)
def test_defaults_are_those_of_each_script(script: str, expected: dict[str, object]) -> None:
    setup = read([], ["accelerate", "launch", *script.split(), "--pretrained_model_name_or_path=m"]).setup
    assert {name: setup[name] for name in expected} == expected


def test_a_controlnet_of_other_blocks_is_told() -> None:
    found = read(
        [],
        [
            "accelerate",
            "launch",
            "train_controlnet_flux.py",
            "--pretrained_model_name_or_path=m",
            "--num_double_layers=2",
        ],
    )
    assert any("num_double_layers" in sentence for sentence in found.lacks)
