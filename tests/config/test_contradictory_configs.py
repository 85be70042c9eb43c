"""Values of a config.json that are of the wrong kind or contradict each other: an error that names the key."""

import json
from typing import Any

import pytest
from support.paths import DATA
from support.reports import lines

from memcalc import InferenceSetup, ModelSpec, TrainingSetup, estimate
from memcalc.errors import ConfigError

MEASURED = DATA / "measured"


def of(family: str) -> dict[str, Any]:
    """The config of a measured row of the family."""
    for path in [MEASURED / f"{family}.jsonl", *sorted(MEASURED.glob("*.jsonl"))]:
        for line in path.read_text().splitlines() if path.exists() else ():
            config: dict[str, Any] = json.loads(line)["case"]["config"]
            if config["model_type"] == family:
                return config
    raise LookupError(family)


WRONG: list[tuple[str, str, object]] = [
    ("llama", "num_hidden_layers", 10**9),
    ("llama", "num_hidden_layers", "many"),
    ("llama", "num_key_value_heads", 1000),
    ("gpt2", "n_layer", 10**6),
    ("glm", "partial_rotary_factor", float("nan")),
    ("stablelm", "partial_rotary_factor", float("inf")),
    ("falcon", "num_kv_heads", 1000),
    ("vit", "image_size", [1]),
    ("vit", "image_size", [None, 3]),
    ("vit", "image_size", [[32, 32]]),
    ("dinov2", "mlp_ratio", -1),
    ("dinov2", "image_size", "large"),
    ("falcon_mamba", "expand", float("nan")),
    ("mamba2", "n_groups", 1000),
    ("nemotron_h", "n_groups", 1000),
    ("glm4_moe", "n_group", 1000),
    ("deepseek_v3", "n_group", 1000),
    ("qwen3_next", "linear_num_key_heads", 1000),
    ("albert", "inner_group_num", 10**9),
    ("gpt_neo", "attention_types", [[1, 2]]),
    ("mixtral", "num_experts_per_tok", 1000),
    ("qwen3_moe", "num_experts_per_tok", 1000),
    ("deepseek_v3", "num_experts_per_tok", 1000),
    ("deepseek_v3", "topk_group", 1000),
    ("granitemoe", "num_experts_per_tok", 1000),
    ("gpt_oss", "num_experts_per_tok", 1000),
    ("gemma2", "sliding_window", None),
    ("gemma3_text", "sliding_window_pattern", None),
    ("llava", "vision_config", None),
    ("qwen2_5_vl", "vision_config", None),
    ("gemma3", "vision_config", "large"),
    ("clip", "vision_config", None),
    ("zamba2", "layers_block_type", ["mamba"]),
    ("zamba2", "layers_block_type", ["mamba", "hybrid", "mamba", "attention"]),
    ("zamba2", "n_mamba_heads", 7),
    ("zamba2", "num_attention_heads", 7),
    ("zamba2", "mamba_expand", 0),
    ("recurrent_gemma", "block_types", ["recurrent", "mamba"]),
    ("recurrent_gemma", "block_types", []),
    ("recurrent_gemma", "lru_width", 321),
    ("recurrent_gemma", "attention_window_size", None),
    ("rwkv", "attention_hidden_size", "wide"),
    ("bamba", "z_loss_coefficient", "small"),
]


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (
            {"_class_name": "AutoencoderOfNobody"},
            r"'AutoencoderOfNobody', a part of a diffusion pipeline.*model_index.json",
        ),
        ({"model_type": 3}, "no 'model_type' that is a string"),
        ({"model_type": ["llama"]}, "no 'model_type' that is a string"),
        ({}, "no 'model_type'"),
        ({"model_type": ""}, "no 'model_type'"),
    ],
)
def test_what_names_no_family(config: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        ModelSpec.from_config(config)


@pytest.mark.parametrize(("family", "key", "value"), WRONG)
@pytest.mark.parametrize("setup", [TrainingSetup(), InferenceSetup()], ids=["training", "inference"])
def test_the_key_is_named(family: str, key: str, value: object, setup: TrainingSetup | InferenceSetup) -> None:
    try:
        config = of(family)
    except LookupError:
        config = {"model_type": family}
    config |= {"new_decoder_architecture": True} if family == "falcon" else {}
    if key == "expand":
        config.pop("intermediate_size", None)
    config[key] = value
    if key == "partial_rotary_factor" and "rope_parameters" in config:
        config["rope_parameters"] = {key: value}
    with pytest.raises(ConfigError, match=key):
        estimate(ModelSpec.from_config(config), setup)


def test_sizes_left_out_are_said() -> None:
    report = estimate(ModelSpec.from_config({"model_type": "llama", "hidden_size": 4096}), TrainingSetup())
    (line,) = (line for line in lines(report) if "leaves out" in line)
    assert "num_hidden_layers 32" in line
    assert "vocab_size 32000" in line
    assert "hidden_size" not in line
