"""LoRA files without a config, under the names of each trainer, on the denoiser of a single file."""

from pathlib import Path

import pytest
from support import single_file_parts as parts
from support import single_files as whole
from support.cli_runs import answer, assumes, refused
from support.weights import write

from memcalc.inference.pipeline import call_pipeline
from memcalc.setup.setup import InferenceSetup, TrainingSetup
from memcalc.sources import load
from memcalc.sources.diffusers_spec import describe_pipeline
from memcalc.sources.loaded_model import LoadedModel

H = 256
KOHYA = ("lora_down.weight", "lora_up.weight")
PEFT = ("lora_A.weight", "lora_B.weight")


def _pair(
    module: str, inputs: int, outputs: int, ends: tuple[str, str] = PEFT, rank: int = 4
) -> dict[str, tuple[int, ...]]:
    return {f"{module}.{ends[0]}": (rank, inputs), f"{module}.{ends[1]}": (outputs, rank)}


def _file(path: Path, shapes: whole.Shapes) -> str:
    return str(write(path, {name: ("BF16", shape) for name, shape in shapes.items()}))


def _flux(folder: Path) -> str:
    return _file(folder / "flux.safetensors", whole.flux(2, 2, H))


def _loaded(folder: Path, lora: whole.Shapes) -> LoadedModel:
    return load(_flux(folder), kind="file", adapter=_file(folder / "lora.safetensors", lora))


SINGLE = {"attn.to_k", "attn.to_q", "attn.to_v", "proj_mlp"}


@pytest.mark.parametrize(
    ("lora", "targets"),
    [
        (_pair("lora_unet_single_blocks_1_linear1", H, 7 * H, KOHYA), SINGLE),
        (_pair("lora_unet_double_blocks_0_txt_mlp_0", H, 4 * H, KOHYA), {"ff_context.net.0.proj"}),
        (_pair("transformer.transformer_blocks.0.attn.to_add_out", H, H), {"attn.to_add_out"}),
        (_pair("base_model.model.transformer_blocks.0.ff.net.2", 4 * H, H), {"ff.net.2"}),
        (_pair("diffusion_model.single_blocks.0.linear2", 5 * H, H), {"proj_out"}),
        (_pair("double_blocks.0.processor.proj_lora1", H, H, ("down.weight", "up.weight")), {"attn.to_out.0"}),
    ],
)
def test_modules_are_found_under_the_names_of_each_trainer(
    tmp_path: Path, lora: whole.Shapes, targets: set[str]
) -> None:
    model = _loaded(tmp_path, lora)
    found = describe_pipeline(model, "model", TrainingSetup())
    assert found is not None
    setup = found.setup
    assert isinstance(setup, TrainingSetup)
    assert setup.lora_rank == 4
    text = (setup.lora_targets or "").replace("\\", "").replace("(?:", "(")
    assert all(target in text for target in targets)


def test_a_fused_layer_is_adapted_in_each_part(tmp_path: Path) -> None:
    """diffusers gives the same input factor to query, key, value and MLP."""
    lora: whole.Shapes = {}
    for block in range(2):
        lora |= _pair(f"lora_unet_single_blocks_{block}_linear1", H, 7 * H, KOHYA)
    alone, adapted = load(_flux(tmp_path), kind="file"), _loaded(tmp_path, lora)
    sizes = []
    for model in (alone, adapted):
        found = describe_pipeline(model, "model", InferenceSetup())
        assert found is not None
        step = call_pipeline(found.spec, InferenceSetup(height=64, width=64))
        sizes.append(sum(step.components.values()))
    assert sizes[1] - sizes[0] == 2 * 2 * (4 * 4 * H + 4 * 7 * H)


def test_what_is_trained_further_and_what_the_user_says(tmp_path: Path) -> None:
    base, lora = _flux(tmp_path), _file(tmp_path / "l.safetensors", _pair("transformer.proj_out", H, 64, rank=2))
    found = answer("from-file", base, "--adapter", lora, "--lora-rank", "8", "--resolution", "64")
    assert found["setup"]["lora_rank"] == 8
    assert assumes(found, "--lora-rank as given")
    same = answer("from-file", lora, "--base", base, "--resolution", "64")
    assert same["setup"]["lora_rank"] == 2


def test_text_encoders_and_blocks_without_adapters_are_told(tmp_path: Path) -> None:
    base = _file(tmp_path / "sdxl.safetensors", whole.under("model.diffusion_model.", parts.sdxl_unet()))
    lora = _pair("lora_te1_text_model_encoder_layers_0_self_attn_q_proj", 768, 768, KOHYA)
    lora |= _pair("lora_unet_input_blocks_4_1_transformer_blocks_0_attn1_to_q", 640, 640, KOHYA)
    lora |= {"lora_unet_input_blocks_1_0_in_layers_2.lora_down.weight": (4, 320, 3, 3)}
    lora |= {"lora_unet_input_blocks_1_0_in_layers_2.lora_up.weight": (320, 4, 1, 1)}
    found = describe_pipeline(
        load(base, kind="file", adapter=_file(tmp_path / "l.safetensors", lora)), "m", InferenceSetup()
    )
    assert found is not None
    said = " ".join(line.text for line in found.assumptions)
    assert "text encoders (6,144 parameters) are not counted" in said or "text encoders (6.14k" in said
    assert "some blocks alone have adapters on attn1.to_q" in said
    assert "1 of its modules, which are no linear layers" in said


@pytest.mark.parametrize(
    ("lora", "words"),
    [
        ({"lora_unet_x.hada_w1_a": (4, 4)}, "LoHa, and memcalc computes LoRA only"),
        (_pair("blocks.0.self_attn.q", 8, 8), "none of FluxTransformer2DModel's"),
    ],
)
def test_what_cannot_be_put_on_the_base(tmp_path: Path, lora: whole.Shapes, words: str) -> None:
    file = _file(tmp_path / "lora.safetensors", lora)
    assert words in refused(1, "from-file", _flux(tmp_path), "--adapter", file)


def test_wrong_usage(tmp_path: Path) -> None:
    base = _flux(tmp_path)
    assert "holds no adapter" in refused(2, "from-file", base, "--adapter", base)
    lora = _file(tmp_path / "l.safetensors", _pair("transformer.proj_out", H, 64))
    assert "leave one out" in refused(2, "from-file", base, "--adapter", lora, "--base", base)
    assert "only an adapter" in refused(1, "from-file", lora)
