"""The tape as `memcalc trace` lists it: what is alive sums to the report's peaks."""

from typing import Any

import pytest
from support.shapes import decoder

from memcalc import InferenceSetup, ModelSpec, TrainingSetup, estimate
from memcalc.errors import UsageError
from memcalc.provenance.listing import listing

SPEC = ModelSpec.from_config(decoder(64, 4, 4, 2, 128, 320))


@pytest.mark.parametrize(
    "setup",
    [
        TrainingSetup(batch=2, seq_len=100),
        TrainingSetup(batch=2, seq_len=100, activation_checkpointing="full", precision="mixed-bf16"),
        TrainingSetup(batch=2, seq_len=100, lora_rank=4, trainer="trl"),
        InferenceSetup(batch=3, seq_len=100),
        InferenceSetup(batch=3, seq_len=100, engine="vllm"),
    ],
    ids=["training", "checkpointed", "lora", "inference", "vllm"],
)
def test_what_is_alive_sums_to_the_peaks(setup: Any) -> None:
    report = estimate(SPEC, setup)
    lines = listing(SPEC, setup)
    phases = {name: getattr(report.phases, name) for name in type(report.phases).model_fields}
    for phase in {line.phase for line in lines} & phases.keys():
        found = [line for line in lines if line.phase == phase]
        assert max(line.live_bytes for line in found) == phases[phase].peak_bytes
        assert [line.live_bytes for line in found if line.is_peak] == [phases[phase].peak_bytes]
    assert [line.tick for line in lines] == list(range(len(lines)))
    assert all(line.dies is None or line.tick < line.dies <= len(lines) for line in lines)
    assert {line.block for line in lines} >= {"", "block 1 of 4", "block 4 of 4"}
    assert all(line.operation for line in lines)


def test_a_phase_and_the_peak() -> None:
    setup = TrainingSetup(batch=2, seq_len=100)
    whole = listing(SPEC, setup, phase="forward")
    peak = next(line.tick for line in whole if line.is_peak)
    few = listing(SPEC, setup, phase="forward", around_peak=3)
    assert few == [line for line in whole if abs(line.tick - peak) <= 3]
    with pytest.raises(UsageError, match="choose from forward, backward"):
        listing(SPEC, setup, phase="step")
