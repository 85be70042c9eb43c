"""Encoders in inference: one forward pass without a cache, as MemTracker counted it (torch 2.14.1, transformers 5.24).

Rows: `measure.py` with `model(input_ids=ids)` and no decoded token, in bf16.
"""

from typing import Any

import pytest
from support.measured_rows import standing
from support.reports import lines

from memcalc import ModelSpec, estimate, find_gpu
from memcalc.errors import UsageError
from memcalc.inference.generate import generate
from memcalc.peak.sweep import Sweep
from memcalc.setup.setup import InferenceSetup

BERT = {
    "model_type": "bert",
    "vocab_size": 5008,
    "hidden_size": 384,
    "intermediate_size": 1536,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "max_position_embeddings": 512,
    "architectures": ["BertForMaskedLM"],
}
DISTILBERT = {
    "model_type": "distilbert",
    "vocab_size": 5008,
    "dim": 384,
    "hidden_dim": 1536,
    "n_layers": 3,
    "n_heads": 6,
    "max_position_embeddings": 512,
    "architectures": ["DistilBertForMaskedLM"],
}
ALBERT = {**BERT, "model_type": "albert", "embedding_size": 128, "architectures": ["AlbertForMaskedLM"]}
MODERNBERT = {
    **BERT,
    "model_type": "modernbert",
    "intermediate_size": 640,
    "num_hidden_layers": 4,
    "pad_token_id": 0,
    "architectures": ["ModernBertForMaskedLM"],
}
DEBERTA = {**BERT, "model_type": "deberta-v2", "architectures": ["DebertaV2ForSequenceClassification"]}
NARROW = {**DEBERTA, "hidden_size": 320, "intermediate_size": 900, "num_attention_heads": 5}

ROWS: list[tuple[dict[str, Any], int, int, int]] = [
    (BERT, 3, 192, 21867008),
    ({**BERT, "architectures": ["BertForSequenceClassification"]}, 3, 192, 20068864),
    ({**BERT, "architectures": ["BertModel"]}, 3, 192, 20066816),
    (DISTILBERT, 3, 192, 21861376),
    (ALBERT, 3, 192, 13293568),
    (MODERNBERT, 3, 192, 21552640),
    (DEBERTA, 3, 192, 21950976),
    (NARROW, 2, 100, 11223040),
    ({**NARROW, "num_hidden_layers": 6}, 2, 100, 17554432),
]


@pytest.mark.parametrize(("config", "batch", "seq_len", "peak"), ROWS)
def test_the_pass_is_as_measured(config: dict[str, Any], batch: int, seq_len: int, peak: int) -> None:
    step = generate(ModelSpec.from_config(config), InferenceSetup(batch=batch, seq_len=seq_len, dtype="bf16"))
    found, _ = Sweep(step.tape).peaks()
    assert found["prefill"][0] + standing(step, "prefill") == peak


@pytest.mark.parametrize("engine", ["transformers", "transformers-static", "vllm"])
def test_there_is_no_cache_and_the_gpu_is_answered_for(engine: str) -> None:
    setup = InferenceSetup(batch=4, seq_len=128, engine=engine)  # type: ignore[arg-type]
    report = estimate(ModelSpec.from_config(BERT), setup, find_gpu("24GB"))
    assert report.kv_cache_bytes == 0
    assert "KV cache" not in {part.name for part in report.components.other_overhead.parts}
    assert report.peak.phase == "prefill"
    assert report.serving is not None
    assert report.serving.longest_context == 512
    assert any("one forward pass" in line for line in lines(report))


@pytest.mark.parametrize(
    "option", [{"max_new_tokens": 2}, {"num_beams": 2}, {"kv_dtype": "fp8"}, {"prefill_chunk_size": 8}]
)
def test_decoding_is_refused_by_name(option: dict[str, Any]) -> None:
    name = next(iter(option)).replace("_", "-")
    with pytest.raises(UsageError, match=rf"^--{name} .* bert is an encoder.*leave it out\.$"):
        generate(ModelSpec.from_config(BERT), InferenceSetup(**option))
