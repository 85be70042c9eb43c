"""Tokens decoded before the last: the cache that they leave behind, in every layer."""

from typing import Any

import pytest

from memcalc import ModelSpec, estimate
from memcalc.report.schema import InferencePhases
from memcalc.setup.setup import InferenceSetup

LLAMA = {
    "model_type": "llama",
    "hidden_size": 256,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "intermediate_size": 512,
    "vocab_size": 1000,
}
WINDOWED = {**LLAMA, "model_type": "gemma3_text", "sliding_window": 64, "sliding_window_pattern": 3, "head_dim": 64}


def decode(config: dict[str, Any], **options: Any) -> int:
    """The peak of decode in bytes."""
    report = estimate(ModelSpec.from_config(config), InferenceSetup(batch=2, **options))
    assert isinstance(report.phases, InferencePhases)
    return report.phases.decode.peak_bytes


@pytest.mark.parametrize(
    "options",
    [{}, {"num_beams": 2}, {"kv_dtype": "fp8"}, {"engine": "transformers-static"}, {"engine": "vllm"}],
    ids=str,
)
@pytest.mark.parametrize("tokens", [2, 3, 500])
def test_decode_behind_decoded_tokens_is_decode_behind_a_prompt_of_that_length(
    options: dict[str, Any], tokens: int
) -> None:
    longer = decode(LLAMA, seq_len=99 + tokens, max_new_tokens=1, **options)
    assert decode(LLAMA, seq_len=100, max_new_tokens=tokens, **options) == longer


def test_a_window_fills_and_then_only_full_layers_grow() -> None:
    assert decode(WINDOWED, seq_len=20, max_new_tokens=30) == decode(WINDOWED, seq_len=49, max_new_tokens=1)
    grown = decode(WINDOWED, seq_len=20, max_new_tokens=600) - decode(WINDOWED, seq_len=20, max_new_tokens=500)
    cached = 2 * (2 * 100 * 256 * 2)  # key and value of 2 sequences in bf16
    assert 2 * cached < grown < 4 * cached  # two of seven layers, and one layer's old and new ones side by side


@pytest.mark.parametrize("kv_dtype", ["int8", "int4"])
def test_a_quantized_cache_keeps_its_latest_tokens_in_full_in_every_layer(kv_dtype: str) -> None:
    prompt = decode(LLAMA, seq_len=599, max_new_tokens=1, kv_dtype=kv_dtype)
    residual = 2 * 7 * (2 * 127 * 256 * 2)  # key and value, 7 layers, batch × tokens × width in bf16
    assert prompt < decode(LLAMA, seq_len=100, max_new_tokens=500, kv_dtype=kv_dtype) < prompt + residual
