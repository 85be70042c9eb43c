"""Checkpoints of one file, under the names that their repositories gave: which model they are, to the parameter.

Counts are those of diffusers' classes with the released models' configs, built without data.
"""

from pathlib import Path

import pytest
from support import single_file_parts as parts
from support import single_files as whole
from support import single_files_more as more
from support.cli_runs import refused, run
from support.weights import write

from memcalc.errors import ConfigError
from memcalc.inference.pipeline import call_pipeline
from memcalc.models.stored_weights import StoredWeights
from memcalc.setup.setup import InferenceSetup, TrainingSetup
from memcalc.sources import load
from memcalc.sources.diffusers_spec import describe_pipeline
from memcalc.sources.loaded_model import LoadedModel

COMFY = "model.diffusion_model."


def _loaded(folder: Path, shapes: whole.Shapes, dtype: str = "BF16") -> LoadedModel:
    path = write(folder / "model.safetensors", {name: (dtype, shape) for name, shape in shapes.items()})
    return load(str(path), kind="file")


def _all_in_one_flux() -> whole.Shapes:
    out = whole.under(COMFY, whole.flux()) | whole.under("vae.", parts.vae(16, quant_conv=False))
    out |= whole.under("text_encoders.clip_l.transformer.", parts.clip(projection=True))
    return out | whole.under("text_encoders.t5xxl.transformer.", parts.t5())


@pytest.mark.parametrize(
    ("shapes", "class_name", "parameters"),
    [
        (whole.flux(), "FluxTransformer2DModel", 11_901_408_320),
        (whole.under(COMFY, whole.flux(guidance=False)), "FluxTransformer2DModel", 11_891_178_560),
        ({**whole.flux(), "img_in.weight": (3072, 384)}, "FluxTransformer2DModel", 11_902_391_360),
        (whole.chroma(), "ChromaTransformer2DModel", 8_899_983_424),
        (whole.flux2(), "Flux2Transformer2DModel", 32_223_281_152),
        (whole.flux2(5, 20, 3072, 7680, guidance=False), "Flux2Transformer2DModel", 3_875_544_576),
        (whole.under(COMFY, whole.sd3()), "SD3Transformer2DModel", 2_028_328_000),
        (whole.sd3(24, side=384, qk_norm=True, dual=13), "SD3Transformer2DModel", 2_243_171_520),
        (whole.sd3(38, qk_norm=True), "SD3Transformer2DModel", 8_056_627_520),
        (whole.wan(), "WanTransformer3DModel", 14_288_491_584),
        (whole.under(COMFY, whole.wan(1536, 30, 8960)), "WanTransformer3DModel", 1_418_996_800),
        (whole.under("diffusion_model.", whole.qwen_image()), "QwenImageTransformer2DModel", 20_430_401_088),
        (whole.wan(channels=36, image=1280), "WanTransformer3DModel", 16_394_878_784),
        (more.hunyuan_video(), "HunyuanVideoTransformer3DModel", 12_821_012_544),
        (more.sana(), "SanaTransformer2DModel", 1_604_462_752),
        (more.pixart(), "PixArtTransformer2DModel", 610_856_096),
        (whole.ltx(), "LTXVideoTransformer3DModel", 1_923_385_472),
        (whole.lumina2(), "Lumina2Transformer2DModel", 2_609_769_152),
        (whole.under(COMFY, whole.z_image()), "ZImageTransformer2DModel", 6_154_908_736),
        (whole.under(COMFY, parts.unet()), "UNet2DConditionModel", 859_520_964),
        (whole.under(COMFY, parts.unet(channels=9)), "UNet2DConditionModel", 859_535_364),
        (whole.under(COMFY, parts.sd2_unet()), "UNet2DConditionModel", 865_910_724),
    ],
)
def test_a_denoiser_is_recognised_by_its_names(
    tmp_path: Path, shapes: whole.Shapes, class_name: str, parameters: int
) -> None:
    (part,) = _loaded(tmp_path, shapes).components
    assert part.class_name == class_name
    assert part.checkpoint is not None
    assert part.checkpoint.parameters == parameters


@pytest.mark.parametrize(
    ("shapes", "expected"),
    [
        (parts.sd15_file(), {"unet": 859_520_964, "text_encoder": 123_060_480, "vae": 83_653_863}),
        (parts.sd21_file(), {"unet": 865_910_724, "text_encoder": 340_387_840, "vae": 83_653_863}),
        (
            parts.sdxl_file(),
            {"unet": 2_567_463_684, "text_encoder": 123_060_480, "text_encoder_2": 694_659_840, "vae": 83_653_863},
        ),
        (
            _all_in_one_flux(),
            {
                "transformer": 11_901_408_320,
                "text_encoder": 123_060_480,
                "text_encoder_2": 4_762_310_656,
                "vae": 83_819_683,
            },
        ),
    ],
)
def test_an_all_in_one_file_is_a_pipeline(tmp_path: Path, shapes: whole.Shapes, expected: dict[str, int]) -> None:
    model = _loaded(tmp_path, shapes)
    assert {part.name: part.checkpoint and part.checkpoint.parameters for part in model.components} == expected
    assert all(part.counted for part in model.components)


def test_a_file_is_called_as_its_pipeline_is(tmp_path: Path) -> None:
    model = _loaded(tmp_path, parts.sd15_file(), "F16")
    found = describe_pipeline(model, "model", InferenceSetup())
    assert found is not None
    step = call_pipeline(found.spec, InferenceSetup())
    assert step.resolved_options["dtype"] == "fp16"
    assert step.resolved_options["height"] == 512
    assert sum(step.components.values()) == pytest.approx(2 * (859_520_964 + 123_060_480 + 83_653_863), rel=1e-3)


def test_weights_in_fp8_are_widened(tmp_path: Path) -> None:
    shapes = whole.under(COMFY, whole.flux(1, 1, 256))
    shapes |= {f"{COMFY}double_blocks.0.img_attn.qkv.scale_weight": (), f"{COMFY}scaled_fp8": (2,)}
    model = _loaded(tmp_path, shapes, "F8_E4M3")
    assert any("fp8" in note for note in model.notes)
    found = describe_pipeline(model, "model", TrainingSetup(lora_rank=4))
    assert found is not None
    assert found.spec.stored == StoredWeights()


def test_averaged_weights_are_not_loaded(tmp_path: Path) -> None:
    shapes = whole.under(COMFY, parts.unet()) | {"model_ema.decay": (1,), "model_ema.diffusion_modelw": (4, 4)}
    model = _loaded(tmp_path, shapes)
    assert len(model.components) == 1
    assert any("model_ema" in note for note in model.notes)


@pytest.mark.parametrize(
    ("shapes", "words"),
    [
        ({"double_stream_blocks.0.block.adaLN_modulation.1.bias": (8,)}, "HiDream, which memcalc does not describe"),
        ({"transformer_blocks.0.attn.to_q.weight": (8, 8)}, "under diffusers' names, whose config.json is missing"),
        (whole.flux(1, 1, 256) | {"double_blocks.0.more.weight": (7,)}, "a variant that memcalc does not describe"),
        ({**whole.flux(1, 1, 256), "txt_in.weight": (256,)}, "in a shape that memcalc does not know (txt_in.weight)"),
    ],
)
def test_what_is_not_known_is_said_in_a_sentence(tmp_path: Path, shapes: whole.Shapes, words: str) -> None:
    model = _loaded(tmp_path, shapes)
    with pytest.raises(ConfigError, match=r"model\.safetensors") as caught:
        model.require_config()
    assert words in str(caught.value)
    assert words in refused(1, "from-file", str(tmp_path / "model.safetensors"))
    run("inspect", str(tmp_path / "model.safetensors"))


@pytest.mark.parametrize("tokens", ["513", "4096"])
def test_a_text_that_the_pipeline_refuses(tmp_path: Path, tokens: str) -> None:
    path = write(tmp_path / "f.safetensors", {name: ("BF16", shape) for name, shape in whole.flux(1, 1, 256).items()})
    line = ("from-file", str(path), "--mode", "inference", "--resolution", "64", "--max-sequence-length")
    assert "512" in refused(2, *line, tokens)
    run(*line, "512")
