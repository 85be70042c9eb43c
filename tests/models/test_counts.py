"""Exact parameter counts: total, and active for mixtures of experts.

Each line of `counts/*.jsonl` holds a shape and the count of the model that Transformers builds from it (meta device).
"""

import json
from typing import Any

import pytest
from support.paths import DATA

from memcalc.models.build import build
from memcalc.models.spec import ModelSpec
from memcalc.nn.parameter_counts import active_parameters

LINES = {
    f"{path.stem}:{number}:{case['name']}": case
    for path in sorted((DATA / "counts").glob("*.jsonl"))
    for number, case in enumerate(map(json.loads, path.read_text().splitlines()))
}


@pytest.mark.parametrize("name", LINES)
def test_count(name: str) -> None:
    case: dict[str, Any] = LINES[name]
    network = build(ModelSpec.from_config(case["config"], case["name"]))
    assert sum(parameter.numel * parameter.copies for _, parameter in network.parameters()) == case["params"]
    if case.get("active") is not None:
        assert active_parameters(network) == case["active"]


MISTRAL_SMALL_31: dict[str, Any] = {
    "model_type": "mistral3",
    "architectures": ["Mistral3ForConditionalGeneration"],
    "spatial_merge_size": 2,
    "vision_feature_layer": -1,
    "text_config": {
        "model_type": "mistral",
        "hidden_size": 5120,
        "intermediate_size": 32768,
        "num_hidden_layers": 40,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 131072,
        "sliding_window": None,
    },
    "vision_config": {
        "model_type": "pixtral",
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "patch_size": 14,
        "image_size": 1540,
        "head_dim": 64,
    },
}


@pytest.mark.parametrize(
    ("more", "count"),
    [
        ({"tie_word_embeddings": False}, 24_011_361_280),
        ({"transformers_version": "4.50.0.dev0"}, 24_011_361_280),
        ({"text_config": MISTRAL_SMALL_31["text_config"] | {"tie_word_embeddings": False}}, 24_011_361_280),
        ({"tie_word_embeddings": True}, 24_011_361_280 - 131072 * 5120),
        ({}, 24_011_361_280 - 131072 * 5120),
    ],
)
def test_whose_head_is_tied(more: dict[str, Any], count: int) -> None:
    assert total(MISTRAL_SMALL_31 | more) == count


@pytest.mark.parametrize(
    ("head", "count"),
    [("NomicBertModel", 136_731_648), ("NomicBertForSequenceClassification", 136_731_648 + 768 * 769 + 2 * 769)],
)
def test_which_models_have_a_pooler(head: str, count: int) -> None:
    """nomic-embed-text-v1.5: the model without a head has no pooler, a classifier has one."""
    assert total({"model_type": "nomic_bert", "architectures": [head], "max_position_embeddings": 8192}) == count


def total(config: dict[str, Any]) -> int:
    network = build(ModelSpec.from_config(config))
    return sum(parameter.numel * parameter.copies for _, parameter in network.parameters())
