"""A spec and a setup become the memory of one step over time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from memcalc.autograd.tape import ROWS
from memcalc.common.assumption import Assumption
from memcalc.estimation.estimate import estimate
from memcalc.estimation.traced_steps import most_loaded_step
from memcalc.models.spec import ModelSpec
from memcalc.peak.sweep import swept
from memcalc.peak.timeline import OFF_TAPE_SHARE, Run, phases_of, resampled, runs_of, stacks_of
from memcalc.report.rows import standing_parts, sum_parts
from memcalc.report.schema import Report
from memcalc.report.timeline import Timeline
from memcalc.setup.setup import InferenceSetup, TrainingSetup
from memcalc.tables.gpus import Gpu
from memcalc.training.traced_step import Step

SAMPLES = 400
"""Pieces of the axis where nobody says how many."""


_ONE_MICRO_BATCH = Assumption(
    "pipeline_micro_batch",
    "of a pipeline one micro-batch is shown, the one with the fullest moment: the others that are in flight then stand "
    "beside it",
)


def of_one_micro_batch(setup: TrainingSetup | InferenceSetup) -> tuple[Assumption, ...]:
    """What has to be said of the tensors of a pipeline; nothing of other jobs."""
    pipelined = isinstance(setup, TrainingSetup) and setup.pipeline_parallel_size > 1
    return (_ONE_MICRO_BATCH,) if pipelined else ()


def timeline(
    spec: ModelSpec,
    setup: TrainingSetup | InferenceSetup,
    gpu: Gpu | str | None = None,
    *,
    assumptions: Sequence[Assumption] = (),
    teacher: ModelSpec | None = None,
    samples: int = SAMPLES,
) -> Timeline:
    """The memory of one optimizer step, or of prefill and one decoded token, over time; on the most loaded GPU.

    Args:
        spec: the model.
        setup: what is run.
        gpu: the GPU to fit, or its name or size as `find_gpu` takes them.
        assumptions: lines that the caller already has to say.
        teacher: the model that distillation asks.
        samples: pieces of the axis; of each the fullest moment is kept.

    Raises:
        MemcalcError: as `estimate`.
    """
    report = estimate(spec, setup, gpu, assumptions=(*assumptions, *of_one_micro_batch(setup)), teacher=teacher)
    runs = _runs(most_loaded_step(spec, setup, teacher, gpu), report)
    return Timeline(
        report, tuple(resampled(runs, samples)), tuple(phases_of(runs, samples)), tuple(stacks_of(runs, samples))
    )


def _runs(step: Step, report: Report) -> list[Run]:
    """The whole step, with what stands beside the tape and what the process has besides tensors."""
    runs = []
    taped = [run for run in runs_of(swept(step.tape)[0]) if run.phase in step.phases]
    length = max(sum(run.length for run in taped), 1)
    for phase in step.phases:
        found = [run for run in taped if run.phase == phase]
        runs += found or [Run(phase, [[0]] * len(ROWS), drawn=max(length // OFF_TAPE_SHARE, 1))]
    outside = report.peak.process_bytes - max(phase.peak_bytes for _, phase in report.phases.items())
    added = {}
    for phase in step.phases:
        sizes = [sum_parts(parts) for parts in standing_parts(step, phase).values()]
        sizes[-1] += outside
        added[phase] = sizes
    return [
        replace(run, rows=[[live + more for live in row] for row, more in zip(run.rows, added[run.phase], strict=True)])
        for run in runs
    ]
