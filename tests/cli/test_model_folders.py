"""`from-file` and `inspect` on folders as people have them: what their reports say about the files."""

from pathlib import Path
from typing import Any

import pytest
from support.cli_runs import answer, assumes, refused, run, weights
from support.weights import Tensors, layers, write, write_json

from memcalc.report.schema import Report

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
EMBEDDING: Tensors = {"model.embed_tokens.weight": ("BF16", (1000, 64)), "model.norm.weight": ("BF16", (64,))}
WHOLE: Tensors = {**EMBEDDING, "lm_head.weight": ("BF16", (1000, 64)), **layers(3)}


def folder(path: Path, tensors: Tensors, **config: Any) -> str:
    write_json(path / "config.json", LLAMA | config)
    write(path / "model.safetensors", tensors)
    return str(path)


def test_config_and_files_that_agree_leave_no_line(tmp_path: Path) -> None:
    found = answer("from-file", folder(tmp_path, WHOLE), "--mode", "inference")
    assert not assumes(found, "the files hold")
    assert assumes(found, "weights in bf16, as config.json declares")


def test_what_the_files_hold_besides(tmp_path: Path) -> None:
    tensors = {**EMBEDDING, "lm_head.weight": ("BF16", (1000, 64)), **layers(4)}
    found = answer("from-file", folder(tmp_path, tensors, tie_word_embeddings=True))
    assert assumes(found, "tied, but stored twice", "64,000")
    assert assumes(found, "multi-token prediction", "not counted")
    assert found["model"]["parameters"]["total"] == 211_904
    assert assumes(found, "stored BF16, declared BF16, loaded F32")


def test_a_head_that_the_files_lack(tmp_path: Path) -> None:
    found = answer("from-file", folder(tmp_path, {**EMBEDDING, **layers(3)}))
    assert assumes(found, "no head", "64,000", "counted from the config")


@pytest.mark.parametrize(("options", "nbytes"), [((), 2), (("--dtype", "fp32"), 4)])
def test_the_declared_dtype_is_the_default(tmp_path: Path, options: tuple[str, ...], nbytes: int) -> None:
    found = answer("from-file", folder(tmp_path, WHOLE, torch_dtype="torch.float16"), "--mode", "inference", *options)
    assert weights(found) == pytest.approx(275_904 * nbytes, rel=0.02)
    assert found["setup"]["dtype"] == ("fp32" if options else "fp16")


def test_the_stored_dtype_where_none_is_declared(tmp_path: Path) -> None:
    found = answer("from-file", folder(tmp_path, WHOLE, torch_dtype="auto"), "--mode", "inference")
    assert assumes(found, "weights in bf16, as they are stored")


def test_an_unknown_family_names_the_generic_way(tmp_path: Path) -> None:
    path = folder(tmp_path, WHOLE, model_type="strange")
    assert "--generic" in refused(1, "from-file", path)
    found = answer("from-file", path, "--generic")
    assert assumes(found, "'strange' is unknown", "Llama-like")
    assert found["model"]["parameters"]["total"] == 275_904


def test_generic_from_other_words_for_the_same(tmp_path: Path) -> None:
    words = {
        "model_type": "x",
        "n_embd": 64,
        "n_layer": 3,
        "n_head": 4,
        "n_inner": 192,
        "padded_vocab_size": 1000,
        "multi_query_attention": True,
        "multi_query_group_num": 2,
    }
    path = write_json(tmp_path / "config.json", words)
    found = answer("from-file", str(path), "--generic", "--mode", "inference")
    assert found["model"]["parameters"]["total"] == 275_904
    assert found["kv_cache_bytes"] == 2 * 3 * 2 * 16 * 2 * 256
    path = write_json(tmp_path / "config.json", words | {"multi_query_attention": False})
    assert (
        answer("from-file", str(path), "--generic", "--mode", "inference")["kv_cache_bytes"] == 2 * 3 * 4 * 16 * 2 * 256
    )


def test_generic_merges_a_text_config(tmp_path: Path) -> None:
    """The text model's own values win; dtype and quantization may stand only at the top."""
    inner = {key: value for key, value in LLAMA.items() if key not in ("model_type", "torch_dtype", "architectures")}
    outer = {"model_type": "x", "dtype": "float16", "vocab_size": 5, "text_config": inner}
    path = write_json(tmp_path / "config.json", outer)
    found = answer("from-file", str(path), "--generic", "--mode", "inference")
    assert found["model"]["parameters"]["total"] == 275_904
    assert found["setup"]["dtype"] == "fp16"
    path = write_json(tmp_path / "config.json", outer | {"quantization_config": {"quant_method": "fp8"}})
    found = answer("from-file", str(path), "--generic", "--mode", "inference")
    assert found["setup"]["quantization"] == "fp8"
    assert found["kv_cache_bytes"] == 2 * 3 * 2 * 16 * 2 * 256


def test_generic_experts(tmp_path: Path) -> None:
    words = {**LLAMA, "model_type": "x", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96}
    found = answer("from-file", str(write_json(tmp_path / "config.json", words)), "--generic")
    assert found["model"]["parameters"]["total"] > found["model"]["parameters"]["active"]


def test_generic_says_what_it_lacks_and_doubts(tmp_path: Path) -> None:
    path = str(write_json(tmp_path / "config.json", {"model_type": "x", "hidden_size": 64}))
    assert "num_hidden_layers, num_attention_heads" in refused(1, "from-file", path, "--generic")
    path = str(write_json(tmp_path / "config.json", {**LLAMA, "model_type": "x", "num_key_value_heads": [1, 2]}))
    assert "for each of the 3 layers" in refused(1, "from-file", path, "--generic")
    path = str(write_json(tmp_path / "config.json", {**LLAMA, "model_type": "x", "kv_source_layer_ids": [1]}))
    assert "kv_source_layer_ids" in refused(1, "from-file", path, "--generic")
    found = answer("from-file", path, "--generic", "--generic-ignore", "kv_source_layer_ids")
    assert assumes(found, "low confidence", "kv_source_layer_ids")
    assert "add --generic" in refused(2, "from-file", path, "--generic-ignore", "kv_source_layer_ids")


def test_generic_from_names_alone(tmp_path: Path) -> None:
    tensors = {**EMBEDDING, **layers(3), "model.layers.0.self_attn.q_norm.weight": ("BF16", (16,))}
    path = str(write(tmp_path / "model.safetensors", tensors))
    assert "--generic" in refused(1, "from-file", path)
    found = answer("from-file", path, "--generic", "--mode", "inference")
    assert assumes(found, "read off the weights' names")
    assert weights(found) == pytest.approx(2 * 211_920, abs=4096)
    blind = str(write(tmp_path / "b.safetensors", {**EMBEDDING, **layers(3)}))
    assert "num_attention_heads" in refused(1, "from-file", blind, "--generic")


def pipeline(path: Path) -> str:
    names = {"transformer": 3, "text_encoder": 2, "vae": 1}
    index = {name: ["diffusers", name.title()] for name in names} | {"scheduler": ["diffusers", "S"]}
    write_json(path / "model_index.json", {"_class_name": "P", **index})
    write_json(path / "scheduler" / "scheduler_config.json", {})
    for name, count in names.items():
        write_json(path / name / "config.json", {"_class_name": name})
        write(path / name / "diffusion_pytorch_model.safetensors", layers(count))
    return str(path)


@pytest.mark.parametrize("mode", ["training", "inference"])
def test_a_diffusion_pipeline_is_its_weights(tmp_path: Path, mode: str) -> None:
    path, one = pipeline(tmp_path), 49_280 * 2
    found = answer("from-file", path, "--mode", mode, "--gpu", "24GB")
    parts = {part["name"]: part["bytes"] for part in found["components"]["model_weights"]["parts"]}
    assert parts == {"transformer": 3 * one, "text_encoder": 2 * one, "vae": one}
    assert {phase["peak_bytes"] for phase in found["phases"].values()} == {6 * one}
    assert found["setup"]["mode"] == "inference"
    assert assumes(found, "out of scope")
    assert assumes(found, "with model offload", "encode text_encoder", "denoise transformer", "decode vae")
    assert found["gpu"]["fits"]
    assert weights(answer("from-file", path, "--mode", "inference", "--dtype", "fp32")) == 12 * one
    assert "transformer" in run("from-file", path).stdout
    assert "diffusion pipeline" in run("inspect", path).stdout
    run("from-file", path, "--gpu", "300MB", "--check", code=3)


def adapter(path: Path, base: str = "org/gone", **config: Any) -> str:
    tensors: Tensors = {
        f"base_model.model.model.layers.{layer}.self_attn.{name}.lora_{side}.weight": ("F32", shape)
        for layer in range(3)
        for name, outputs in (("q_proj", 64), ("v_proj", 32))
        for side, shape in (("A", (8, 64)), ("B", (outputs, 8)))
    }
    stated = {"peft_type": "LORA", "r": 8, "target_modules": ["q_proj", "v_proj"], "base_model_name_or_path": base}
    write_json(path / "adapter_config.json", stated | {"modules_to_save": None} | config)
    write(path / "adapter_model.safetensors", tensors)
    return str(path)


def test_an_adapter_names_its_base(tmp_path: Path) -> None:
    path = adapter(tmp_path / "adapter")
    for command in ("from-file", "inspect"):
        said = refused(1, command, path)
        assert "org/gone" in said
        assert "--base" in said
        assert "5,376 parameters" in said


def test_an_adapter_on_its_base(tmp_path: Path) -> None:
    base = folder(tmp_path / "base", WHOLE)
    path = adapter(tmp_path / "adapter", base)
    found = answer("from-file", path)
    assert found["model"]["parameters"]["total"] == 281_280
    assert found["model"]["parameters"]["trainable"] == 5_376
    assert assumes(found, "LoRA of rank 8", "q_proj", "adapter_config.json")
    assert (
        answer("from-file", path, "--lora-rank", "4", "--lora-targets", "o_proj")["model"]["parameters"]["trainable"]
        == 1_536
    )
    alone = answer("from-file", base, "--mode", "inference")
    assert weights(answer("from-file", path, "--mode", "inference")) == weights(alone) + 4 * 5_376
    text = run("inspect", path).stdout
    assert "275,904" in text
    assert "5,376" in text


def test_quantized_weights_are_those_of_the_files(tmp_path: Path) -> None:
    """Packed words and constants as stored; norms, embedding and head in the dtype of the run."""
    packed: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name, (dtype, shape) in layers(3).items():
        if len(shape) == 1:
            packed[name] = (dtype, shape)
            continue
        stem = name.removesuffix("weight")
        packed[stem + "qweight"] = ("I32", (shape[1] // 8, shape[0]))
        packed[stem + "scales"] = ("F16", (shape[1] // 32, shape[0]))
        packed[stem + "qzeros"] = ("I32", (shape[1] // 32, shape[0] // 8))
    stated = {"quant_method": "gptq", "bits": 4, "group_size": 32}
    tensors = {**EMBEDDING, "lm_head.weight": ("BF16", (1000, 64)), **packed}
    path = folder(tmp_path, tensors, quantization_config=stated)
    found = answer("from-file", path, "--mode", "inference")
    matrices = 3 * 49_152
    constants = matrices // 32 * 2 + matrices // 32 // 2
    assert weights(found) == pytest.approx(matrices // 2 + constants + 2 * (275_904 - matrices), abs=4096)
    assert found["setup"]["quantization"].startswith("gptq")
    assert found["model"]["parameters"]["total"] == 275_904
    assert assumes(found, "stored quantized")
    config_alone = str(tmp_path / "config.json")
    assert weights(answer("from-file", config_alone, "--mode", "inference")) == pytest.approx(weights(found), rel=0.05)
    assert "leave out --quantization" in refused(2, "from-file", path, "--mode", "inference", "--quantization", "nf4")


def test_reports_of_every_kind_keep_the_contract(tmp_path: Path) -> None:
    from pydantic import TypeAdapter

    for found in (
        answer("from-file", pipeline(tmp_path)),
        answer("from-file", folder(tmp_path / "m", WHOLE), "--mode", "inference"),
    ):
        TypeAdapter(Report).validate_python(found)
