"""--generic: which keys of an unknown decoder are taken into account, and which are refused by name."""

from pathlib import Path
from typing import Any

import pytest
from support.cli_runs import answer, assumes, refused
from support.shapes import decoder
from support.weights import write_json

BASE = decoder(2048, 8, 16, 4, 5504, 32000, model_type="unheard-of")
GEMMA4_31B = {
    "model_type": "unheard-of",
    "text_config": decoder(5376, 60, 32, 16, 21504, 262144)
    | {
        "num_global_key_value_heads": 4,
        "head_dim": 256,
        "global_head_dim": 512,
        "sliding_window": 1024,
        "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 10,
    },
}


def generic(folder: Path, config: dict[str, Any], *options: str, mode: str = "inference") -> dict[str, Any]:
    path = write_json(folder / "config.json", config)
    return answer("from-file", str(path), "--generic", "--mode", mode, *options)


def test_windows_and_heads_of_global_layers(tmp_path: Path) -> None:
    """50 layers of window 1024 and 10 that attend to everything with other heads: 3.3 GiB, not 30."""
    found = generic(tmp_path, GEMMA4_31B, "--engine", "vllm", "--seq-len", "32768")
    full, sliding = 10 * 2 * 4 * 512 * 32768, 50 * 2 * 16 * 256 * 1024
    assert found["kv_cache_bytes"] == 2 * (full + sliding)
    assert assumes(found, "50 of window 1024 with 16 x 256", "10 full with 4 x 512")


@pytest.mark.parametrize(
    ("more", "elements"),
    [
        ({"sliding_window": 64}, 8 * 2 * 4 * 128 * 64),
        ({"sliding_window": 64, "use_sliding_window": False}, 8 * 2 * 4 * 128 * 256),
        ({"sliding_window": 64, "sliding_window_pattern": 4}, 2 * 4 * 128 * (6 * 64 + 2 * 256)),
        ({"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 6}, 2 * 4 * 128 * (6 * 256 + 2 * 64)),
        ({"num_key_value_heads": [4, 2] * 4}, 2 * 128 * 256 * 24),
        ({"head_dim": [128, 64] * 4}, 2 * 4 * 256 * 4 * 192),
    ],
    ids=str,
)
def test_caches(tmp_path: Path, more: dict[str, Any], elements: int) -> None:
    found = generic(tmp_path, BASE | more, "--engine", "vllm")
    assert found["kv_cache_bytes"] == 2 * elements


def test_lists_shared_experts_and_dense_layers(tmp_path: Path) -> None:
    plain = generic(tmp_path, BASE)["model"]["parameters"]["total"]
    narrow = generic(tmp_path, BASE | {"intermediate_size": [5504, 2752] * 4})["model"]["parameters"]["total"]
    assert plain - narrow == 4 * 3 * 2048 * 2752
    experts = {"n_routed_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 768}
    mixed = BASE | experts | {"n_shared_experts": 2, "first_k_dense_replace": 1}
    found = generic(tmp_path, mixed)["model"]["parameters"]
    assert found["total"] - plain == 7 * (16 * 3 * 2048 * 768 + 16 * 2048 + 3 * 2048 * (1536 - 5504))
    assert found["active"] < found["total"]
    assert generic(tmp_path, mixed, mode="training")["model"]["parameters"]["total"] == found["total"]


def test_latent_attention(tmp_path: Path) -> None:
    latent = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    found = generic(tmp_path, BASE | latent)
    attention = 2048 * 16 * 192 + 2048 * 576 + 512 + 512 * 16 * 256 + 16 * 128 * 2048
    assert (
        found["model"]["parameters"]["total"] == 8 * (attention + 3 * 2048 * 5504 + 2 * 2048) + 2 * 32000 * 2048 + 2048
    )


@pytest.mark.parametrize(
    "key",
    [
        {"kv_lora_rank": 512},
        {"linear_num_value_heads": 16},
        {"full_attention_interval": 4},
        {"ssm_state_size": 128},
        {"mamba_d_state": 16},
        {"num_kv_shared_layers": 4},
        {"attention_k_eq_v": True},
        {"hidden_size_per_layer_input": 256},
        {"index_n_heads": 4},
        {"attention_chunk_size": 512},
        {"vision_config": {"depth": 2}},
        {"hybrid_override_pattern": "M*"},
    ],
    ids=lambda key: next(iter(key)),
)
def test_what_is_not_understood_is_refused_by_name(tmp_path: Path, key: dict[str, Any]) -> None:
    path = str(write_json(tmp_path / "config.json", BASE | key))
    (name,) = key
    assert name in refused(1, "from-file", path, "--generic")
    found = answer("from-file", path, "--generic", "--generic-ignore", name)
    assert assumes(found, "low confidence", name)


def test_kinds_of_layers_that_are_not_known(tmp_path: Path) -> None:
    path = str(write_json(tmp_path / "config.json", BASE | {"layer_types": ["linear_attention"] * 8}))
    assert "'linear_attention'" in refused(1, "from-file", path, "--generic")


@pytest.mark.parametrize("inner", ["llm_config", "thinker_config", "text_config"])
def test_nested_configs(tmp_path: Path, inner: str) -> None:
    text = {key: value for key, value in BASE.items() if key != "model_type"}
    nested = {inner: {"text_config": text} if inner == "thinker_config" else text, "model_type": "unheard-of"}
    assert generic(tmp_path, nested)["model"] == generic(tmp_path, BASE)["model"]


def test_keys_that_change_nothing_are_no_trouble(tmp_path: Path) -> None:
    idle: dict[str, Any] = {
        "num_nextn_predict_layers": 1,
        "rope_theta": 1e6,
        "router_aux_loss_coef": 0.1,
        "kv_lora_rank": None,
    }
    idle |= {"num_kv_shared_layers": 0, "vision_config": {}, "attention_dropout": 0.1, "use_cache": True}
    assert generic(tmp_path, BASE | idle)["model"] == generic(tmp_path, BASE)["model"]
