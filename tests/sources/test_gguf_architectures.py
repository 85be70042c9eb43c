"""Every architecture of llama.cpp whose family is known is read as that family: its keys give the same parameters."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.cli_runs import answer, refused, run
from support.gguf_files import gguf

from memcalc import ModelSpec
from memcalc.models.build import build
from memcalc.models.registry import families
from memcalc.sources.gguf.architectures import MODEL_TYPES
from memcalc.sources.gguf.config import config_from_gguf
from memcalc.sources.gguf.header import read_gguf
from memcalc.sources.gguf.translations import TRANSLATIONS

VOCABULARY = 1000


class _Bytes:
    """A file in memory."""

    def __init__(self, data: bytes, size: int) -> None:
        self.data, self.size = data, size

    def read(self, offset: int, length: int) -> bytes:
        return self.data[offset : offset + length]


def config_of(architecture: str, **keys: Any) -> dict[str, Any]:
    """What is read of a header with these keys (dots as double underscores) and an embedding of 256."""
    metadata = {"general.architecture": architecture}
    metadata |= {f"{architecture}.{key.replace('__', '.')}": value for key, value in keys.items()}
    tensors = {"token_embd.weight": ("F16", (VOCABULARY, 256)), "output.weight": ("F16", (VOCABULARY, 256))}
    return config_from_gguf(read_gguf(_Bytes(*gguf(tensors, metadata)), "m.gguf"), "m.gguf")


def parameters(config: dict[str, Any]) -> int:
    spec = ModelSpec.from_config(config)
    return sum(parameter.numel * parameter.copies for _, parameter in build(spec).parameters())


COMMON = {
    "block_count": 4,
    "embedding_length": 256,
    "feed_forward_length": 512,
    "attention__head_count": 8,
    "attention__head_count_kv": 2,
    "attention__key_length": 32,
}
OURS = {
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 512,
    "vocab_size": VOCABULARY,
    "tie_word_embeddings": False,
}
EXPERTS = {"expert_count": 8, "expert_used_count": 2, "expert_feed_forward_length": 64}
DELTA = {
    "ssm__state_size": 16,
    "ssm__group_count": 4,
    "ssm__time_step_rank": 8,
    "ssm__inner_size": 256,
    "ssm__conv_kernel": 4,
    "full_attention_interval": 2,
}
OUR_DELTA = {
    "linear_key_head_dim": 16,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 2,
}
MAMBA2 = {
    "ssm__conv_kernel": 4,
    "ssm__state_size": 16,
    "ssm__group_count": 1,
    "ssm__time_step_rank": 8,
    "ssm__inner_size": 512,
}
HYBRID = {**COMMON, **MAMBA2, "attention__head_count_kv": [0, 2, 0, 0]}
OUR_MAMBA2 = {
    "mamba_d_conv": 4,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
    "mamba_n_heads": 8,
    "mamba_d_head": 64,
    "mamba_expand": 2,
}

CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("qwen35", COMMON | DELTA, OURS | OUR_DELTA | {"model_type": "qwen3_5_text"}),
    (
        "qwen35moe",
        COMMON | DELTA | EXPERTS | {"expert_shared_feed_forward_length": 64},
        OURS
        | OUR_DELTA
        | {
            "model_type": "qwen3_5_moe_text",
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 64,
        },
    ),
    (
        "qwen3next",
        COMMON | DELTA | EXPERTS | {"expert_shared_feed_forward_length": 64},
        OURS
        | OUR_DELTA
        | {
            "model_type": "qwen3_next",
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 64,
        },
    ),
    ("qwen3vl", COMMON, OURS | {"model_type": "qwen3"}),
    ("qwen2vl", COMMON, OURS | {"model_type": "qwen2"}),
    (
        "qwen3vlmoe",
        COMMON | EXPERTS,
        OURS | {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
    ),
    (
        "granitehybrid",
        HYBRID | {"expert_shared_feed_forward_length": 96, "expert_count": 8, "expert_used_count": 2},
        OURS
        | OUR_MAMBA2
        | {
            "model_type": "granitemoehybrid",
            "layer_types": ["mamba", "attention", "mamba", "mamba"],
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 96,
        },
    ),
    (
        "granitehybrid",
        HYBRID,
        OURS
        | OUR_MAMBA2
        | {
            "model_type": "granitemoehybrid",
            "layer_types": ["mamba", "attention", "mamba", "mamba"],
            "num_local_experts": 0,
            "shared_intermediate_size": 512,
        },
    ),
    ("falcon-h1", COMMON | MAMBA2, OURS | OUR_MAMBA2 | {"model_type": "falcon_h1", "mamba_d_ssm": 512}),
    (
        "minimax-m2",
        COMMON | EXPERTS | {"rope__dimension_count": 16},
        OURS
        | {
            "model_type": "minimax_m2",
            "intermediate_size": 64,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "rotary_dim": 16,
        },
    ),
    ("hunyuan-dense", COMMON, OURS | {"model_type": "hunyuan_v1_dense"}),
    ("llama-embed", COMMON, OURS | {"model_type": "llama"}),
    ("mistral3", COMMON, OURS | {"model_type": "ministral3"}),
    (
        "lfm2",
        COMMON | {"attention__head_count_kv": [0, 2, 0, 2], "shortconv__l_cache": 3},
        OURS
        | {
            "model_type": "lfm2",
            "layer_types": ["conv", "full_attention", "conv", "full_attention"],
            "conv_L_cache": 3,
            "block_auto_adjust_ff_dim": False,
        },
    ),
    (
        "mamba",
        {"block_count": 4, "embedding_length": 256, "ssm__conv_kernel": 4, "ssm__state_size": 16}
        | {"ssm__inner_size": 512, "ssm__time_step_rank": 16},
        {"model_type": "mamba", "hidden_size": 256, "num_hidden_layers": 4, "state_size": 16, "vocab_size": VOCABULARY}
        | {"conv_kernel": 4, "expand": 2, "time_step_rank": 16, "tie_word_embeddings": False},
    ),
    (
        "nemotron_h",
        {"block_count": 4, "embedding_length": 256, "attention__head_count": [0, 8, 0, 0], "attention__key_length": 32}
        | MAMBA2
        | {"attention__head_count_kv": [0, 2, 0, 0], "feed_forward_length": [0, 0, 512, 0]},
        OURS
        | {
            "model_type": "nemotron_h",
            "hybrid_override_pattern": "M*-M",
            "mamba_num_heads": 8,
            "mamba_head_dim": 64,
            "ssm_state_size": 16,
            "n_groups": 1,
            "conv_kernel": 4,
        },
    ),
    (
        "deepseek2",
        COMMON
        | EXPERTS
        | {
            "attention__head_count_kv": 1,
            "attention__key_length": 576,
            "attention__value_length": 512,
            "attention__key_length_mla": 48,
            "attention__value_length_mla": 32,
            "attention__kv_lora_rank": 64,
            "rope__dimension_count": 16,
            "expert_shared_count": 1,
            "leading_dense_block_count": 1,
        },
        {key: value for key, value in OURS.items() if key != "head_dim"}
        | {
            "model_type": "deepseek_v3",
            "num_key_value_heads": 8,
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "kv_lora_rank": 64,
            "qk_nope_head_dim": 32,
            "qk_rope_head_dim": 16,
            "v_head_dim": 32,
            "first_k_dense_replace": 1,
        },
    ),
]


@pytest.mark.parametrize(("architecture", "keys", "ours"), CASES, ids=[case[0] for case in CASES])
def test_the_same_parameters(architecture: str, keys: dict[str, Any], ours: dict[str, Any]) -> None:
    config = config_of(architecture, **keys)
    assert config["model_type"] == ours["model_type"]
    assert parameters(config) == parameters(ours)


def test_every_row_leads_to_a_family() -> None:
    unknown = {name for name, family in MODEL_TYPES.items() if family not in families()}
    assert unknown <= {"gemma3n", "gemma4"}
    assert set(TRANSLATIONS) <= {*MODEL_TYPES, *families()}


@pytest.mark.parametrize(("architecture", "head"), [("bert", "BertModel"), ("nomic-bert", "NomicBertModel")])
def test_encoders_have_no_head(architecture: str, head: str) -> None:
    config = config_of(architecture, **{key: value for key, value in COMMON.items() if "kv" not in key})
    assert config["architectures"] == [head]


def test_blocks_of_multi_token_prediction_are_not_the_models() -> None:
    config = config_of("glm4moe", **(COMMON | EXPERTS | {"block_count": 5, "nextn_predict_layers": 1}))
    assert config["num_hidden_layers"] == 4


def write(folder: Path, name: str, architecture: str, **keys: Any) -> str:
    metadata = {"general.architecture": architecture}
    metadata |= {f"{architecture}.{key.replace('__', '.')}": value for key, value in keys.items()}
    data, size = gguf({"token_embd.weight": ("F16", (VOCABULARY, 256))}, metadata)
    path = folder / name
    with path.open("wb") as handle:
        handle.write(data)
        handle.truncate(size)
    return str(path)


def test_the_cache_of_a_hybrid(tmp_path: Path) -> None:
    """Qwen 3.5 with experts: 10 of 40 layers attend, 640 MiB in fp16 at 32,768 tokens."""
    keys = {
        "block_count": 40,
        "embedding_length": 2048,
        "attention__head_count": 16,
        "attention__head_count_kv": 2,
        "attention__key_length": 256,
        "full_attention_interval": 4,
        "expert_count": 256,
        "expert_used_count": 8,
        "expert_feed_forward_length": 512,
        "ssm__inner_size": 4096,
        "ssm__state_size": 128,
    }
    path = write(tmp_path, "q.gguf", "qwen35moe", **keys)
    found = answer("from-file", path, "--mode", "inference", "--seq-len", "32768")
    assert found["kv_cache_bytes"] == 640 * 2**20


def test_gemma_4_by_its_keys(tmp_path: Path) -> None:
    """40 layers of window 1024 (and an ubatch) with 8 heads of 256, 8 full ones with one head of 512, in q8_0."""
    keys = {
        **COMMON,
        "block_count": 48,
        "attention__head_count_kv": [8, 8, 8, 8, 8, 1] * 8,
        "attention__key_length": 512,
        "attention__key_length_swa": 256,
        "attention__sliding_window": 1024,
        "attention__sliding_window_pattern": [1, 1, 1, 1, 1, 0] * 8,
    }
    path = write(tmp_path, "g.gguf", "unheard-of", **keys)
    found = answer("from-file", path, "--generic", "--mode", "inference", "--seq-len", "131072", "--kv-dtype", "int8")
    elements = 2 * (8 * 512 * 131072 + 40 * 8 * 256 * (1024 + 512))
    assert found["kv_cache_bytes"] == elements * 34 // 32


def test_gemma_4_whose_global_layers_have_other_heads() -> None:
    """Five layers within the window with 8 heads, then one with a single head of 512, whose keys are its values."""
    config = config_of(
        "gemma4",
        block_count=12,
        embedding_length=256,
        feed_forward_length=[512] * 6 + [1024] * 6,
        attention__head_count=8,
        attention__head_count_kv=[8, 8, 8, 8, 8, 1] * 2,
        attention__key_length=512,
        attention__key_length_swa=256,
        attention__sliding_window=1024,
        attention__sliding_window_pattern=[1, 1, 1, 1, 1, 0] * 2,
    )
    assert (config["num_key_value_heads"], config["num_global_key_value_heads"]) == (8, 1)
    assert config["attention_k_eq_v"] is True
    assert (config["head_dim"], config["global_head_dim"]) == (256, 512)
    assert (config["intermediate_size"], config["use_double_wide_mlp"]) == (512, True)


def test_an_unknown_architecture_is_not_told_to_edit_a_config(tmp_path: Path) -> None:
    path = write(tmp_path, "m.gguf", "wondrous", block_count=2, embedding_length=64)
    message = refused(1, "from-file", path)
    assert "'wondrous'" in message
    assert "inspect" in message
    assert "config.json" not in message
    message = refused(1, "from-file", path, "--generic")
    assert "config.json" not in message


def test_other_models_of_a_folder_are_no_quantizations(tmp_path: Path) -> None:
    for name in ("tiny-Q4_K_M.gguf", "tiny-Q8_0.gguf", "other-Q4_K_S.gguf"):
        write(tmp_path, name, "llama", **COMMON)
    found = json.loads(run("inspect", str(tmp_path), "--json").stdout)
    reasons = {file["path"]: file["reason"] for file in found["ignored"]}
    assert reasons["tiny-Q8_0.gguf"] == "another GGUF quantization of the same weights"
    assert reasons["other-Q4_K_S.gguf"] == "another model"
    assert any("tiny-Q4_K_M.gguf is used" in note and "Q8_0, other-Q4_K_S.gguf" in note for note in found["notes"])
