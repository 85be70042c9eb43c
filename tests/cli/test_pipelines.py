"""Folders of diffusion pipelines in inference: which components are where, when, and in what."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.cli_runs import answer, refused

CLIP = {"model_type": "clip_text_model", "hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2}
T5 = {"model_type": "t5", "d_model": 64, "d_ff": 128, "num_layers": 2, "num_heads": 4, "vocab_size": 1000}
FLUX = {"num_layers": 1, "num_single_layers": 2, "attention_head_dim": 32, "num_attention_heads": 2}
PARTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "transformer": (
        "diffusers",
        "FluxTransformer2DModel",
        FLUX | {"joint_attention_dim": 64, "pooled_projection_dim": 64, "axes_dims_rope": [8, 12, 12]},
    ),
    "vae": (
        "diffusers",
        "AutoencoderKL",
        {
            "block_out_channels": [32, 64],
            "latent_channels": 16,
            "sample_size": 256,
            "down_block_types": ["DownEncoderBlock2D"] * 2,
            "up_block_types": ["UpDecoderBlock2D"] * 2,
        },
    ),
    "text_encoder": ("transformers", "CLIPTextModel", CLIP | {"num_attention_heads": 2, "dtype": "bfloat16"}),
    "text_encoder_2": ("transformers", "T5EncoderModel", T5 | {"d_kv": 16, "dtype": "bfloat16"}),
}


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """A small FLUX pipeline without weights."""
    index = {name: [library, kind] for name, (library, kind, _) in PARTS.items()}
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": "FluxPipeline", **index}))
    for name, (_, kind, config) in PARTS.items():
        (tmp_path / name).mkdir()
        written = config if "model_type" in config else {**config, "_class_name": kind}
        (tmp_path / name / "config.json").write_text(json.dumps(written))
    return str(tmp_path)


def ask(folder: str, *options: str) -> dict[str, Any]:
    """The report of the pipeline in inference at 512 pixels."""
    found: dict[str, Any] = answer("from-file", folder, "--mode", "inference", "--resolution", "512", *options)
    return found


def weights(report: dict[str, Any]) -> dict[str, int]:
    """Bytes of MODEL WEIGHTS at the peak, by component."""
    return {part["name"]: part["bytes"] for part in report["components"]["model_weights"]["parts"]}


def peaks(report: dict[str, Any]) -> list[int]:
    """Peaks of encode, denoise and decode."""
    return [report["phases"][phase]["peak_bytes"] for phase in ("encode", "denoise", "vae_decode")]


def test_every_component_has_a_part_and_a_phase(folder: str) -> None:
    report = ask(folder)
    assert set(weights(report)) == {"transformer bf16", "vae bf16", "text_encoder bf16", "text_encoder_2 bf16"}
    assert report["peak"]["phase"] == "vae_decode"
    assert report["peak"]["moment"].startswith("vae_decode of vae")
    standing = sum(weights(report).values())
    assert all(peak > standing for peak in peaks(report))


@pytest.mark.parametrize("kind", ["model", "sequential", "group", "group-leaf"])
def test_what_is_offloaded_is_said_to_be_elsewhere(folder: str, kind: str) -> None:
    whole, report = ask(folder), ask(folder, "--cpu-offload", kind)
    assert all(less <= more for less, more in zip(peaks(report), peaks(whole), strict=True))
    assert peaks(report)[2] < peaks(whole)[2]
    assert any("host memory: " in str(line) and "transformer bf16" in str(line) for line in report["assumptions"])


def test_pictures_of_a_prompt_are_encoded_once(folder: str) -> None:
    one, four, batch = ask(folder), ask(folder, "--num-images-per-prompt", "4"), ask(folder, "--batch", "4")
    assert peaks(four)[2] == peaks(batch)[2] > 2 * peaks(one)[2] - sum(weights(one).values())
    assert peaks(four)[0] < peaks(batch)[0]


def test_kernels_are_those_of_the_gpu(folder: str) -> None:
    of = {gpu: peaks(ask(folder, "--gpu", gpu))[1] for gpu in ("H100-80GB", "A100-80GB", "T4")}
    assert of["H100-80GB"] == peaks(ask(folder))[1]
    assert of["T4"] > of["A100-80GB"]  # bf16 has no fused attention there
    assert peaks(ask(folder, "--gpu", "T4", "--dtype", "fp16"))[1] < of["T4"]


def test_an_explanation_is_of_the_same_gpu(folder: str) -> None:
    options = ("--mode", "inference", "--resolution", "512", "--gpu", "T4")
    found, report = answer("explain", folder, *options), ask(folder, "--gpu", "T4")
    assert sum(entry["bytes"] for entry in found["tensors"]) == report["peak"]["process_bytes"]


def test_tiles_and_slices(folder: str) -> None:
    whole, tiled = ask(folder), ask(folder, "--vae-tiling")
    assert peaks(tiled)[2] < peaks(whole)[2]
    assert peaks(ask(folder, "--vae-tiling", "--height", "256", "--width", "256")) == peaks(
        ask(folder, "--height", "256", "--width", "256")
    )
    sliced = ask(folder, "--batch", "4", "--vae-slicing")
    assert peaks(whole)[2] < peaks(sliced)[2] < peaks(ask(folder, "--batch", "4"))[2]


def test_components_are_quantized_by_name(folder: str) -> None:
    plain, both = (
        weights(ask(folder)),
        weights(ask(folder, "--quantization", "nf4", "--components-to-quantize", "transformer,text_encoder_2")),
    )
    assert both["transformer nf4"] < 0.5 * plain["transformer bf16"]
    assert both["text_encoder_2 nf4"] < plain["text_encoder_2 bf16"]
    alone = weights(ask(folder, "--quantization", "nf4"))
    assert alone["text_encoder_2 bf16"] == plain["text_encoder_2 bf16"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--components-to-quantize", "vae"), "--quantization"),
        (("--quantization", "nf4", "--components-to-quantize", "unet"), "does not have"),
        (("--quantization", "nf4", "--cpu-offload", "sequential"), "leave out --quantization"),
        (("--max-new-tokens", "5"), "language model"),
        (("--seq-len", "5"), "--max-sequence-length"),
        (("--num-frames", "5"), "frames"),
    ],
)
def test_what_a_pipeline_refuses(folder: str, options: tuple[str, ...], said: str) -> None:
    assert said in refused(2, "from-file", folder, "--mode", "inference", *options)


def test_blocks_that_diffusers_cannot_move_are_refused(folder: str) -> None:
    config, index = Path(folder) / "vae" / "config.json", Path(folder) / "model_index.json"
    for file in (config, index):
        file.write_text(file.read_text().replace('"AutoencoderKL"', '"AutoencoderKLFlux2"'))
    assert "group-leaf" in refused(2, "from-file", folder, "--mode", "inference", "--cpu-offload", "group")


def test_pictures_beside_the_noisy_one_are_encoded_and_denoised(folder: str) -> None:
    plain, edited, two = ask(folder), *(ask(folder, "--condition-images", count) for count in "12")
    assert peaks(plain)[0] < peaks(edited)[0] <= peaks(two)[0] < peaks(edited)[0] + 2**20
    assert peaks(plain)[1] < peaks(edited)[1] < peaks(two)[1]
    assert peaks_of_training(train(folder, "--condition-images", "1"))[0] > peaks_of_training(train(folder))[0]


def test_a_language_model_refuses_what_is_a_pipelines() -> None:
    said = refused(2, "estimate", "--params", "1B", "--mode", "inference", "--cpu-offload", "model")
    assert "diffusion pipelines" in said
    refused(2, "estimate", "--params", "1B", "--condition-images", "1")
    assert "diffusion" in refused(2, "estimate", "--params", "1B", "--mode", "inference", "--condition-images", "1")


def train(folder: str, *options: str) -> dict[str, Any]:
    """The report of a LoRA on the pipeline's denoiser at 256 pixels."""
    found: dict[str, Any] = answer("from-file", folder, "--resolution", "256", *options)
    return found


def test_inputs_made_in_the_step_are_a_phase(folder: str) -> None:
    cached, made = train(folder, "--lora-rank", "4"), train(folder, "--lora-rank", "4", "--no-cache-latents")
    assert list(cached["phases"]) == ["forward", "backward", "step"]
    assert made["phases"]["encode"]["peak_bytes"] > made["phases"]["step"]["peak_bytes"]
    assert "vae bf16" in weights(made)
    both = train(folder, "--lora-rank", "4", "--no-cache-latents", "--no-cache-text-embeddings", "--vae-dtype", "fp32")
    assert {"vae fp32", "text_encoder bf16", "text_encoder_2 bf16"} <= set(weights(both))


def test_an_average_of_the_weights_is_a_copy(folder: str) -> None:
    plain, averaged = train(folder), train(folder, "--use-ema")
    copy = weights(averaged)["EMA of the weights"]
    assert peaks_of_training(averaged) == [peak + copy for peak in peaks_of_training(plain)]
    assert "--lora-rank" in refused(2, "from-file", folder, "--use-ema", "--lora-rank", "4")


def peaks_of_training(report: dict[str, Any]) -> list[int]:
    """Peaks of forward, backward and step."""
    return [report["phases"][phase]["peak_bytes"] for phase in ("forward", "backward", "step")]


@pytest.mark.parametrize("option", [("--no-cache-latents",), ("--use-ema",), ("--vae-dtype", "fp32")])
def test_a_language_model_has_no_such_inputs(option: tuple[str, ...]) -> None:
    assert "denoisers" in refused(2, "estimate", "--params", "10M", *option)


UNET = {"block_out_channels": [32, 64], "down_block_types": ["CrossAttnDownBlock2D", "DownBlock2D"]} | {
    "up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D"],
    "cross_attention_dim": 64,
    "attention_head_dim": 4,
}


@pytest.fixture
def unet(tmp_path: Path) -> str:
    """A small UNet by itself."""
    (tmp_path / "config.json").write_text(json.dumps({"_class_name": "UNet2DConditionModel", **UNET}))
    return str(tmp_path)


def test_a_text_encoder_is_trained_with_the_denoiser(folder: str) -> None:
    alone, both = train(folder, "--lora-rank", "4"), train(folder, "--lora-rank", "4", "--train-text-encoder")
    assert both["model"]["parameters"]["trainable"] > alone["model"]["parameters"]["trainable"]
    assert "text_encoder_2 bf16" in weights(both)  # T5 reads the prompt in every step
    gradients = [part["name"] for part in both["components"]["gradients"]["parts"]]
    assert "gradients that no optimizer zeroes" in gradients
    assert "text_encoder: trained" in str(both["assumptions"])


def test_a_controlnet_is_trained_in_front_of_a_frozen_unet(unet: str) -> None:
    whole, control = train(unet), train(unet, "--controlnet")
    assert 0 < control["model"]["parameters"]["trainable"] < whole["model"]["parameters"]["total"]
    assert control["components"]["gradients"]["max_bytes"] < whole["components"]["gradients"]["max_bytes"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--controlnet", "--lora-rank", "4"), "leave out one"),
        (("--controlnet", "--quantization", "nf4"), "leave out --quantization"),
        (("--controlnet", "--textual-inversion"), "leave out one"),
        (("--train-text-encoder",), "text encoders"),
        (("--textual-inversion",), "text encoders"),
        (("--condition-images", "1"), "no room"),
    ],
)
def test_what_training_a_unet_refuses(unet: str, options: tuple[str, ...], said: str) -> None:
    assert said in refused(2, "from-file", unet, *options)


def test_what_is_trained_of_unets_alone_is_refused(folder: str) -> None:
    assert "Stable Diffusion" in refused(2, "from-file", folder, "--textual-inversion")


def test_a_controlnet_of_flux_is_short(folder: str) -> None:
    whole, control = train(folder), train(folder, "--controlnet")
    assert 0 < control["model"]["parameters"]["trainable"] != whole["model"]["parameters"]["trainable"]
    assert "single blocks is trained" in str(control["assumptions"])
    assert "leave out one" in refused(2, "from-file", folder, "--controlnet", "--condition-images", "1")
