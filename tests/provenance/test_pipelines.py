"""Pipelines explained: the fullest micro-batch of the most loaded rank, and what is in flight beside it."""

from typing import Any

import pytest

from memcalc import ModelSpec, TrainingSetup, estimate
from memcalc.provenance.explain import explain
from memcalc.timeline import timeline

SPEC = ModelSpec.from_config({"model_type": "llama", "num_hidden_layers": 8, "hidden_size": 256, "vocab_size": 1024})


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"pipeline_schedule": "gpipe", "microbatches": 4},
        {"pipeline_schedule": "interleaved", "virtual_pipeline_size": 2},
        {"pipeline_rank": 1, "precision": "mixed-bf16", "activation_checkpointing": "full"},
    ],
)
def test_the_tensors_sum_to_the_box(options: dict[str, Any]) -> None:
    setup = TrainingSetup(pipeline_parallel_size=4, seq_len=64, **options)
    peak = estimate(SPEC, setup).peak
    found = explain(SPEC, setup)
    assert found.total_bytes == peak.process_bytes
    assert any(assumption.code == "pipeline_micro_batch" for assumption in found.assumptions)
    drawn = timeline(SPEC, setup)
    assert max(sample.total for sample in drawn.samples) == peak.process_bytes
