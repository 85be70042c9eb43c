"""What people and tools counted wrong, with the right numbers: parameters, dtypes, adapters, quantized footprints."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.cli_runs import refused, run
from support.reports import lines
from support.shapes import decoder
from support.weights import Tensors, layers, write, write_json

from memcalc import InferenceSetup, ModelSpec, TrainingSetup, estimate, find_gpu
from memcalc.errors import UsageError
from memcalc.units import parse_parameters

LLAMA_7B = decoder(4096, 32, 32, 32, 11008, 32000)
LLAMA3_8B = decoder(4096, 32, 32, 8, 14336, 128256)
LLAMA3_70B = decoder(8192, 80, 64, 8, 28672, 128256)
TINYLLAMA = decoder(2048, 22, 32, 4, 5632, 32000)
OPEN_LLAMA_3B = decoder(3200, 26, 32, 32, 8640, 32000)
MIXTRAL = decoder(4096, 32, 32, 8, 14336, 32000, model_type="mixtral", num_local_experts=8)
GPT2 = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257, "n_positions": 1024}
T5_11B = {
    "model_type": "t5",
    "d_model": 1024,
    "d_kv": 128,
    "d_ff": 65536,
    "num_heads": 128,
    "num_layers": 24,
    "vocab_size": 32128,
    "is_encoder_decoder": True,
}
OPT_125M = {"model_type": "opt", "vocab_size": 50272, "max_position_embeddings": 2048}


def serve(config: dict[str, Any], gpu: str | None = None, **options: Any) -> Any:
    return estimate(ModelSpec.from_config(config), InferenceSetup(**options), None if gpu is None else find_gpu(gpu))


def weights(config: dict[str, Any], **options: Any) -> int:
    return int(serve(config, **options).components.model_weights.peak_bytes)


def trained(config: dict[str, Any], **options: Any) -> Any:
    return estimate(ModelSpec.from_config(config), TrainingSetup(precision="bf16", **options)).model.parameters


@pytest.mark.parametrize(
    ("config", "count"),
    [
        (LLAMA3_70B, 70_553_706_496),
        (MIXTRAL, 46_702_792_704),
        (GPT2, 124_439_808),
        (T5_11B, 11_307_321_344),
        (decoder(8192, 80, 64, 64, 24576, 152064, model_type="qwen2"), 72_287_920_128),
        (decoder(3584, 28, 28, 4, 18944, 152064, model_type="qwen2"), 7_615_616_512),
    ],
    ids=["three matrices an MLP", "experts multiply it", "tied", "heads wider than the model", "biases", "7B"],
)
def test_parameters(config: dict[str, Any], count: int) -> None:
    assert serve(config).model.parameters.total == count


def test_a_tied_head_counts_once() -> None:
    head = 50257 * 768
    assert serve({**GPT2, "tie_word_embeddings": False}).model.parameters.total == 124_439_808 + head == 163_037_184


def test_a_70b_in_the_dtype_that_it_declares() -> None:
    """131.4 GiB: neither halved once more for being declared in 16 bits, nor without its head."""
    assert weights({**LLAMA3_70B, "torch_dtype": "bfloat16"}) / 2**30 == pytest.approx(131.42, abs=0.01)


@pytest.mark.parametrize(
    ("stated", "gigabytes"),
    [
        ({"torch_dtype": "bfloat16"}, 13.5),
        ({"dtype": "bfloat16"}, 13.5),
        ({"torch_dtype": "torch.float16"}, 13.5),
        ({"dtype": None}, 13.5),
        ({"torch_dtype": "float32"}, 27.0),
        ({"torch_dtype": "auto"}, 13.5),
        ({"text_config": {"dtype": "bfloat16"}, "torch_dtype": "float32"}, 13.5),
    ],
)
def test_the_dtype_s_two_names_and_its_odd_values(stated: dict[str, Any], gigabytes: float) -> None:
    """6.74 billion parameters; what was assumed stands in the report, and --dtype offers the other number."""
    found = serve({**LLAMA_7B, **stated})
    assert found.components.model_weights.peak_bytes / 1e9 == pytest.approx(gigabytes, abs=0.1)
    assert any("weights in" in line and "--dtype" in line for line in lines(found))
    assert weights({**LLAMA_7B, **stated}, dtype="fp32") / 1e9 == pytest.approx(27.0, abs=0.1)


def test_experts_are_all_resident() -> None:
    found = serve(MIXTRAL)
    assert found.model.parameters.active < found.model.parameters.total / 3
    assert found.components.model_weights.peak_bytes == pytest.approx(2 * found.model.parameters.total, rel=0.001)


def test_four_bits_are_not_half_a_byte() -> None:
    """A "3B" has 3.43 billion parameters, of which embedding and head stay wide."""
    assert serve(OPEN_LLAMA_3B).model.parameters.total == 3_426_473_600
    assert weights(OPEN_LLAMA_3B, quantization="nf4", dtype="fp16") / 1e9 == pytest.approx(2.22, abs=0.02)
    assert weights(OPEN_LLAMA_3B, quantization="nf4-double", dtype="fp16") / 1e9 == pytest.approx(2.07, abs=0.03)
    assert weights(OPEN_LLAMA_3B, quantization="nf4-double", dtype="fp32") / 1e9 == pytest.approx(2.48, abs=0.03)


def test_the_base_takes_the_same_whichever_layers_are_adapted() -> None:
    """An 8B in NF4: 5.3 GiB of weights, with adapters on all layers or on two."""
    assert weights(LLAMA3_8B, quantization="nf4-double") / 2**30 == pytest.approx(5.3, abs=0.03)
    spec = ModelSpec.from_config(LLAMA3_8B)
    sizes = []
    for targets in ("all-linear", "q_proj,v_proj"):
        setup = TrainingSetup(
            precision="bf16",
            quantization="nf4-double",
            lora_rank=8,
            lora_targets=targets,
            prepare_kbit_training=False,
            seq_len=64,
        )
        parts = estimate(spec, setup).components.model_weights.parts
        sizes.append(sum(part.bytes for part in parts if "LoRA" not in part.name))
    assert sizes[0] == sizes[1]
    assert sizes[0] / 2**30 == pytest.approx(5.3, abs=0.03)


@pytest.mark.parametrize(
    ("config", "options", "trainable", "total"),
    [
        (LLAMA3_70B, {"lora_rank": 8, "lora_targets": "all-linear"}, 103_546_880, 70_657_253_376),
        (TINYLLAMA, {"lora_rank": 64, "lora_targets": "all-linear"}, 50_462_720, 1_150_511_104),
        (LLAMA3_8B, {"lora_rank": 8, "lora_targets": "all-linear"}, 20_971_520, 8_051_232_768),
        (
            LLAMA3_8B,
            {"lora_rank": 8, "lora_targets": "all-linear", "modules_to_save": "embed_tokens,lm_head"},
            1_071_644_672,
            8_051_232_768 + 2 * 128256 * 4096,
        ),
        (decoder(5120, 40, 40, 40, 13824, 32000), {"lora_rank": 8, "lora_targets": "q_proj,v_proj"}, 6_553_600, None),
    ],
    ids=["70B", "TinyLlama", "8B", "new tokens make embedding and head trainable", "13B"],
)
def test_adapters(config: dict[str, Any], options: dict[str, Any], trainable: int, total: int | None) -> None:
    found = trained(config, **options)
    assert found.trainable == trainable
    assert total is None or found.total == total


def test_an_adapter_s_size_is_not_the_model_s(tmp_path: Path) -> None:
    """A 13B adapter of rank 8 on query and value whose base was deleted: its 6,553,600 parameters, and what to give."""
    tensors: Tensors = {
        f"base_model.model.model.layers.{i}.self_attn.{name}.lora_{side}.weight": ("F32", shape)
        for i in range(40)
        for name in ("q_proj", "v_proj")
        for side, shape in (("A", (8, 5120)), ("B", (5120, 8)))
    }
    stated = {"peft_type": "LORA", "r": 8, "target_modules": ["q_proj", "v_proj"], "modules_to_save": None}
    write_json(tmp_path / "adapter_config.json", stated | {"base_model_name_or_path": "decapoda-research/llama-13b-hf"})
    write(tmp_path / "adapter_model.safetensors", tensors)
    said = refused(1, "from-file", str(tmp_path))
    assert "6,553,600" in said
    assert "decapoda-research/llama-13b-hf" in said
    assert "--base" in said
    assert "--params" in said


def test_a_name_never_decides(tmp_path: Path) -> None:
    """Files before config, config before name; a folder called 27B is what its config builds, and doubts are said."""
    folder = tmp_path / "Qwen3.8-27B-NVFP4"
    config = decoder(64, 3, 4, 2, 192, 1000)
    write_json(folder / "config.json", config)
    found = json.loads(run("from-file", str(folder), "--json").stdout)
    assert found["model"]["parameters"]["total"] == 275_904
    write(folder / "model.safetensors", {"model.embed_tokens.weight": ("BF16", (3000, 64)), **layers(3)})
    found = json.loads(run("from-file", str(folder), "--json").stdout)
    assert any("the files hold 192,000" in line or "128,000 more" in line for line in lines(found))


def test_what_is_needed_is_not_what_an_engine_occupies() -> None:
    """A model of 125M needs less than 568 MB of tensors; an engine with a pool fills nine tenths of the GPU."""
    needed, pooled = serve(OPT_125M, "24GB", dtype="fp16"), serve(OPT_125M, "24GB", dtype="fp16", engine="vllm")
    assert needed.model.parameters.total == 125_239_296
    assert needed.peak.allocated_bytes < 568e6
    assert (
        pooled.serving.engine_reserved_bytes > pooled.serving.pool.budget_bytes == int(0.92 * needed.gpu.usable_bytes)
    )
    assert pooled.peak.process_bytes < 2e9


@pytest.mark.parametrize("text", ["8x7B", "8x22B", "30B-A3B", "E4B", "", "-7B", "7GB", "nan", "1e999", "0", "A2.7B"])
def test_sizes_that_are_no_count_of_parameters(text: str) -> None:
    with pytest.raises(UsageError):
        parse_parameters(text)
