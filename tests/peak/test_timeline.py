"""The memory of a step over time: exact at every tick, at every resolution, and without losing its maximum."""

import json
from itertools import pairwise
from typing import Any

import pytest
from support.every_block import deep_jobs
from support.every_tick import counted, ticks, traced
from support.shapes import decoder

from memcalc import InferenceSetup, ModelSpec, TrainingSetup, estimate
from memcalc.errors import MemcalcError
from memcalc.peak.sweep import Sweep
from memcalc.peak.timeline import Run, resampled, runs_of
from memcalc.report.timeline import TimelineJson
from memcalc.timeline import timeline

JOBS = [job for name, job in deep_jobs(every=1601) if not name.startswith("router_loss")]
"""Without losses over routers: of the gradients that they make for all blocks at once, the traced block drops its own
tick by tick and those that it stands for at the end (some KiB, away from the peaks)."""

FSDP2: dict[str, Any] = {"gpus": 4, "parallel": "fsdp2"}


def llama(layers: int) -> ModelSpec:
    return ModelSpec.from_config(decoder(64, layers, 4, 2, 128, 320))


@pytest.mark.parametrize("part", range(4))
def test_every_tick_is_that_of_a_run_in_which_every_block_is_traced(part: int) -> None:
    """Counted there from the allocations alone, row by row."""
    tried = 0
    for spec, setup, _ in JOBS[part::4]:
        try:
            traced(spec, setup)
        except MemcalcError:
            continue
        tried += 1
        assert ticks(traced(spec, setup)) == counted(traced(spec, setup, whole=True)), (spec.name, setup)
    assert tried


@pytest.mark.parametrize("layers", [1, 2, 10, 126])
@pytest.mark.parametrize(
    "setup",
    [
        TrainingSetup(batch=2, seq_len=64),
        TrainingSetup(batch=2, seq_len=64, activation_checkpointing="full", precision="bf16"),
        TrainingSetup(seq_len=64, lora_rank=4, optimizer="sgd", grad_accum=4),
        TrainingSetup(seq_len=64, **FSDP2),
        InferenceSetup(batch=3, seq_len=64),
        InferenceSetup(seq_len=64, engine="vllm"),
    ],
    ids=["training", "checkpointed", "lora", "fsdp2", "inference", "vllm"],
)
def test_the_largest_sample_is_the_box(setup: TrainingSetup | InferenceSetup, layers: int) -> None:
    for samples in (49, 189, 1000):
        found = timeline(llama(layers), setup, samples=samples)
        top = found.samples[found.peak]
        assert len(found.samples) == samples
        assert max(sample.total for sample in found.samples) == top.total == found.report.peak.process_bytes
        assert [row.peak_bytes for _, row in found.report.components.rows()] == list(top.rows)
        assert top.phase == found.report.peak.phase
        for name, phase in found.report.phases.items():
            outside = found.report.peak.process_bytes - max(one.peak_bytes for _, one in found.report.phases.items())
            most = max((sample.total for sample in found.samples if sample.phase == name), default=None)
            assert most is None or most <= phase.peak_bytes + outside


def test_samples_are_the_fullest_of_their_piece() -> None:
    step = traced(llama(10), TrainingSetup(batch=2, seq_len=64))
    runs = list(runs_of(Sweep(step.tape)))
    every = [sum(rows) for _, rows in ticks(step)]
    for pieces in (1, 7, 100, len(every)):
        found = resampled(runs, pieces)
        for piece, sample in enumerate(found):
            part = every[piece * len(every) // pieces : (piece + 1) * len(every) // pieces]
            assert sample.total == max(part)


def test_cost_grows_with_kinds_of_blocks_not_with_depth() -> None:
    counts = [
        len(list(runs_of(Sweep(traced(llama(layers), TrainingSetup(batch=1, seq_len=32)).tape))))
        for layers in (10, 126)
    ]
    assert counts[0] == counts[1]


def test_phases_and_blocks_are_marked_where_they_run() -> None:
    found = timeline(llama(126), TrainingSetup(batch=2, seq_len=64), samples=200)
    assert [phase.name for phase in found.phases] == ["forward", "backward", "step"]
    assert found.phases[0].start == 0
    assert found.phases[-1].end == 200
    assert all(one.end == other.start for one, other in pairwise(found.phases))
    assert [(stack.first, stack.last) for stack in found.stacks] == [(1, 126), (126, 1)]
    for phase in found.phases:
        inside = found.samples[round(phase.start) + 1 : round(phase.end) - 1]
        assert {sample.phase for sample in inside} == {phase.name}


def test_passes_over_one_stack_are_told_apart() -> None:
    """Preference training runs the model more than once."""
    setup = TrainingSetup(objective="dpo", batch=1, seq_len=64, max_completion_length=32)
    found = timeline(llama(6), setup, samples=300)
    assert {(stack.first, stack.last) for stack in found.stacks} == {(1, 6), (6, 1)}


def test_a_linear_run_is_highest_at_one_of_its_ends() -> None:
    rising = Run("forward", [[1, 5, 2]], count=10, change=(3,))
    falling = Run("backward", [[100, 105, 102]], count=10, change=(-3,))
    assert rising.highest(0, 30) == (5 + 9 * 3, 9, 1)
    assert rising.highest(1, 29) == (5 + 9 * 3, 9, 1)
    assert rising.highest(4, 27) == (5 + 8 * 3, 8, 1)
    assert falling.highest(2, 30) == (102, 0, 2)
    assert falling.highest(3, 30) == (105 - 3, 1, 1)
    assert rising.highest(3, 4) == (1 + 3, 1, 0)


def test_of_a_pipeline_it_is_the_fullest_micro_batch() -> None:
    setup = TrainingSetup(gpus=2, pipeline_parallel_size=2, batch=1, seq_len=32)
    found = timeline(llama(8), setup).to_dict()
    assert found["peak"]["process_bytes"] == estimate(llama(8), setup).peak.process_bytes


def test_the_json_holds_the_series() -> None:
    found: dict[str, Any] = timeline(llama(4), TrainingSetup(batch=1, seq_len=32), samples=50).to_dict()
    peak = found["samples"][found["peak"]["sample"]]
    assert peak["total_bytes"] == found["peak"]["process_bytes"] == sum(peak["row_bytes"].values())
    assert list(peak["row_bytes"]) == found["rows"]
    assert {sample["blocks"] for sample in found["samples"] if sample["stack"]} == {4}
    assert TimelineJson.model_validate_json(json.dumps(found)).model_dump(mode="json") == found
