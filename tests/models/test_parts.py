"""No part of a row is negative, whatever blocks hand to each other: one model of every measured family, deeper."""

import json
from itertools import product
from typing import Any

import pytest
from support.measured_rows import FOLDER

from memcalc import InferenceSetup, ModelSpec, TrainingSetup, estimate
from memcalc.errors import MemcalcError

DEPTHS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers")


def deeper(config: dict[str, Any]) -> dict[str, Any]:
    """The config with eight layers, where its layers are alike."""
    listed = any(key.endswith(("_types", "_block_type")) for key in config)
    return config if listed else {k: 8 if k in DEPTHS else v for k, v in config.items()}


FIRST = {path.stem: json.loads(path.read_text().splitlines()[0])["case"]["config"] for path in FOLDER.glob("*.jsonl")}


def test_a_mixer_lets_go_what_attention_left_once() -> None:
    """Eager attention's probabilities live until the next block answers, whatever kind that one is."""
    config = {
        "model_type": "bamba",
        "hidden_size": 256,
        "num_hidden_layers": 24,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "intermediate_size": 512,
        "vocab_size": 500,
        "mamba_n_heads": 16,
        "mamba_d_head": 32,
        "attn_layer_indices": [0, 9],
        "num_logits_to_keep": 1,
    }
    peaks = {}
    for attention in ("sdpa", "eager"):
        report = estimate(ModelSpec.from_config(config), InferenceSetup(seq_len=700, attention=attention))
        assert all(part.bytes > 0 for part in report.components.temporary_tensors.parts)
        peaks[attention] = report.peak.allocated_bytes
    assert peaks["eager"] >= peaks["sdpa"]


@pytest.mark.parametrize("name", sorted(FIRST))
def test_parts_are_positive_and_sum_to_their_row(name: str) -> None:
    spec = ModelSpec.from_config(deeper(FIRST[name]))
    answered = 0
    for recipe, checkpointing, optimizer in product(("mixed-bf16", "fp16"), ("none", "full"), ("adamw", "sgd")):
        setup = TrainingSetup(precision=recipe, activation_checkpointing=checkpointing, optimizer=optimizer)  # type: ignore[arg-type]
        try:
            components = estimate(spec, setup).components
        except MemcalcError:
            continue
        answered += 1
        for row in ("model_weights", "optimizer_states", "gradients", "activations", "temporary_tensors"):
            component = getattr(components, row)
            assert all(part.bytes > 0 for part in component.parts), (setup, row)
            assert sum(part.bytes for part in component.parts) == component.peak_bytes
    assert answered
