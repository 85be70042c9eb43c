"""Adapter folders: what adapter_config.json asks for is used or refused by name; none is taken for full training."""

from pathlib import Path
from typing import Any

import pytest
from support.cli_runs import answer, assumes, refused
from support.weights import layers, write, write_json

CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 192,
    "vocab_size": 1000,
}
LORA = {"peft_type": "LORA", "r": 8, "target_modules": ["q_proj", "v_proj"], "lora_alpha": 16}
QV = 3 * 8 * (64 + 64 + 64 + 32)
"""Parameters of rank 8 on query and value."""


def adapter(path: Path, **config: Any) -> str:
    """An adapter's folder, with its base beside it; the weights are those of rank 8 on query and value."""
    base = write_json(path / "base" / "config.json", CONFIG).parent
    write(base / "model.safetensors", {**layers(3), "model.embed_tokens.weight": ("BF16", (1000, 64))})
    start = "base_model.model.model.layers"
    tensors = {
        f"{start}.{layer}.self_attn.{name}.lora_{side}.weight": ("F32", shape)
        for layer in range(3)
        for name, outputs in (("q_proj", 64), ("v_proj", 32))
        for side, shape in (("A", (8, 64)), ("B", (outputs, 8)))
    }
    folder = path / "adapter"
    write(folder / "adapter_model.safetensors", tensors)
    write_json(folder / "adapter_config.json", {**LORA, "base_model_name_or_path": str(base), **config})
    return str(folder)


def trained(path: str, *options: str) -> int:
    return int(answer("from-file", path, *options)["model"]["parameters"]["trainable"])


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("IA3", "IA3"),
        ("ADALORA", "AdaLoRA"),
        ("LOHA", "LoHa"),
        ("LOKR", "LoKr"),
        ("VERA", "VeRA"),
        ("OFT", "OFT"),
        ("PROMPT_TUNING", "prompt tuning"),
        ("PREFIX_TUNING", "prefix tuning"),
        ("P_TUNING", "p-tuning"),
        ("prefix_tuning", "prefix tuning"),
        ("SHIRA", "SHIRA"),
        ("\x1b[2J", "\\x1b"),
        (None, "peft_type"),
        ("", "peft_type"),
        (5, "peft_type"),
    ],
)
@pytest.mark.parametrize("mode", ["training", "inference"])
def test_other_kinds_are_refused_by_name(tmp_path: Path, kind: object, name: str, mode: str) -> None:
    assert name in refused(1, "from-file", adapter(tmp_path, peft_type=kind), "--mode", mode)


@pytest.mark.parametrize(
    ("config", "parameters"),
    [
        ({}, QV),
        ({"peft_type": "lora"}, QV),
        ({"rank_pattern": {"q_proj": 8}, "alpha_pattern": {"q_proj": 32}}, QV),
        ({"target_modules": r".*self_attn\.(q|v)_proj"}, QV),
        ({"target_modules": r"model\.layers\.\d+\.self_attn\.[qv]_proj"}, QV),
        ({"target_modules": "all-linear"}, 3 * 8 * (128 + 96 + 96 + 128 + 3 * 256)),
        ({"use_dora": True}, QV + 3 * 96),
        ({"modules_to_save": ["lm_head"]}, QV + 64_000),
        ({"lora_dropout": 0.1, "init_lora_weights": "pissa_niter_16"}, QV),
        ({"lora_bias": True}, QV + 3 * 96),
    ],
)
def test_what_a_lora_config_asks_for(tmp_path: Path, config: dict[str, Any], parameters: int) -> None:
    assert trained(adapter(tmp_path, **config)) == parameters


def test_dropout_and_defaults(tmp_path: Path) -> None:
    plain, dropped = (answer("from-file", adapter(tmp_path, lora_dropout=p)) for p in (0.0, 0.1))
    assert dropped["setup"]["lora_dropout"] == 0.1
    assert dropped["phases"]["backward"]["peak_bytes"] > plain["phases"]["backward"]["peak_bytes"]
    assert assumes(answer("from-file", adapter(tmp_path, some_new_thing=3)), "some_new_thing", "not counted")
    assert assumes(answer("from-file", adapter(tmp_path, init_lora_weights="olora")), "olora")


def test_options_of_the_user_win_one_by_one(tmp_path: Path) -> None:
    path = adapter(tmp_path, lora_dropout=0.1)
    found = answer("from-file", path, "--lora-rank", "4")
    assert found["model"]["parameters"]["trainable"] == QV // 2
    assert found["setup"]["lora_dropout"] == 0.1
    assert assumes(found, "--lora-rank as given")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("r", value) for value in list[Any](("8", 0, -1, None, 8.5, [], True, 10**30))),
        ("r", 16),  # the weights are of rank 8
        ("rank_pattern", {"q_proj": 16}),
        ("layers_to_transform", [0, 1]),
        ("layers_to_transform", 1),
        ("target_parameters", ["mlp.experts.gate_up_proj"]),
        ("exclude_modules", "lm_head"),
        ("trainable_token_indices", [1, 2]),
        ("layer_replication", [[0, 4], [2, 5]]),
        ("use_qalora", True),
        ("bias", "some"),
        ("bias", True),
        ("lora_dropout", 1.5),
        ("lora_dropout", "0.1"),
        ("use_dora", "yes"),
        ("modules_to_save", "lm_head"),
        ("modules_to_save", ["a,b"]),
        ("init_lora_weights", "loftq"),
        ("init_lora_weights", 5),
        ("target_modules", []),
        ("target_modules", [5]),
        ("target_modules", {"q_proj": 1}),
        ("target_modules", "("),
        ("target_modules", "(a+)+b"),
        ("target_modules", "q_proj"),  # a pattern matches the whole name
        ("target_modules", r"model\.layers\.0\.self_attn\.q_proj"),
        ("target_modules", ["no_such_module"]),
    ],
)
def test_what_cannot_be_or_is_not_computed(tmp_path: Path, key: str, value: object) -> None:
    said = refused(1 if value != ["no_such_module"] else 2, "from-file", adapter(tmp_path, **{key: value}))
    assert key in said or value == ["no_such_module"]


def test_dora_in_inference_is_refused(tmp_path: Path) -> None:
    assert "use_dora" in refused(1, "from-file", adapter(tmp_path, use_dora=True), "--mode", "inference")


def test_what_merging_takes_is_said(tmp_path: Path) -> None:
    """16 bytes a weight of the largest layer (64 by 64) beside a base in 16 bits, 8 beside one in fp32."""
    path = adapter(tmp_path, **LORA)
    for dtype, size in (("bf16", "64.0 KiB"), ("fp32", "32.0 KiB")):
        found = answer("from-file", path, "--base", str(tmp_path / "base"), "--mode", "inference", "--dtype", dtype)
        assert assumes(found, "merge_and_unload", f"{size} more for a moment")
