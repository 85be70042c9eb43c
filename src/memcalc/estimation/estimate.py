"""The report of a job: its traced step, the sweep over it, and what stands around its tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import NoneType
from typing import TYPE_CHECKING

from memcalc.autograd.tape import WEIGHTS
from memcalc.breakdown.process_memory import ProcessMemory
from memcalc.common.arguments import check_type
from memcalc.common.assumption import Assumption
from memcalc.estimation.job import Job, Setup, found_gpu
from memcalc.estimation.process import gpu_fit, process_memory_of
from memcalc.estimation.traced_steps import most_loaded, traced_steps
from memcalc.models.spec import ModelSpec
from memcalc.peak.sweep import swept
from memcalc.report.alternatives import alternatives
from memcalc.report.assumptions import assumed
from memcalc.report.cluster import assumed_of_cluster, cluster, rank_peaks
from memcalc.report.gpu_schema import Serving
from memcalc.report.rows import (
    components_of,
    elsewhere,
    maxima,
    moment_text,
    parameters_of,
    phases_of,
    rows_at_peak,
    standing_parts,
    sum_parts,
)
from memcalc.report.schema import MixedLengths, Model, Peak, Phase, Report
from memcalc.setup.lengths import drawn_lengths, said
from memcalc.setup.setup import InferenceSetup, TrainingSetup
from memcalc.training.float8 import check_float8
from memcalc.training.traced_step import Step

if TYPE_CHECKING:
    from memcalc.tables.gpus import Gpu


def estimate(
    spec: ModelSpec,
    setup: Setup,
    gpu: Gpu | str | None = None,
    *,
    assumptions: Sequence[Assumption] = (),
    teacher: ModelSpec | None = None,
    simulate: bool = True,
) -> Report:
    """The memory that one optimizer step, or prefill and one decoded token, needs on one GPU.

    Args:
        spec: the model.
        setup: what is run.
        gpu: the GPU to fit, or its name or size as `find_gpu` takes them.
        assumptions: what the caller has assumed, to be said in the report.
        teacher: the model that distillation asks.
        simulate: run training jobs on one GPU that is named through PyTorch's allocator, simulated; else what it
            reserves is estimated, in less time.

    Raises:
        MemcalcError: an argument is of a wrong type, or the model or the combination of options cannot be answered for.
    """
    check_type("spec", spec, ModelSpec, "a ModelSpec, as ModelSpec.from_config makes one")
    check_type("setup", setup, (TrainingSetup, InferenceSetup), "a TrainingSetup or an InferenceSetup")
    check_type("teacher", teacher, (ModelSpec, NoneType), "a ModelSpec")
    check_type("assumptions", assumptions, (list, tuple), "a list of assumptions")
    for assumption in assumptions:
        check_type("assumptions", assumption, Assumption, "a list of assumptions: Assumption(code, text)")
    gpu = None if gpu is None else found_gpu(gpu)
    if gpu is not None and isinstance(setup, TrainingSetup) and setup.float8_recipe != "none":
        check_float8(gpu)
    job = Job(spec, setup, gpu, teacher)
    steps, layout = traced_steps(job)
    rank = _least_free(job, steps)
    step = steps[rank]
    if layout.context > 1 and not layout.ulysses:
        steps, layout = {rank: step}, replace(layout, context_rank=rank)
    sweep, found, highest = swept(step.tape)
    phases = {phase: standing_parts(step, phase) for phase in step.phases}
    totals = {phase: sum(map(sum_parts, rows.values())) for phase, rows in phases.items()}
    for phase in totals.keys() & found.keys():
        totals[phase] += found[phase][0]
    top = max(step.phases, key=lambda phase: totals[phase])
    moment = found[top][1] if top in found else None
    process_memory = process_memory_of(job, step, totals[top], layout, simulate=simulate, advise=True)
    rows = rows_at_peak(phases[top], {} if moment is None else sweep.live_at(moment), process_memory)
    parameters = parameters_of(step, spec, layout)
    found_cluster = None
    if layout.gpus > 1 or layout.device_map is not None:
        found_cluster = cluster(setup, layout, rank, step)
    peaks = {phase: Phase(peak_bytes=total) for phase, total in totals.items()}
    return Report(
        model=Model(name=spec.name, family=spec.model_type, parameters=parameters),
        setup=step.resolved() | process_memory.resolved(),
        assumptions=(
            *spec.assumptions,
            *assumptions,
            *assumed(spec, setup, step),
            *elsewhere(step, rows[WEIGHTS]),
            *alternatives(
                spec, setup, step, process_memory.counted, partial(estimate, spec, teacher=teacher, simulate=False)
            ),
            *(() if found_cluster is None else assumed_of_cluster(setup, layout, found_cluster)),
            *process_memory.assumptions(),
            *((gpu.note,) if gpu is not None and gpu.note else ()),
        ),
        components=components_of(rows, maxima(phases, highest, process_memory), parameters),
        saved_for_backward_bytes=sweep.saved_for_backward(step.forward_end) if step.training else None,
        phases=phases_of(step, peaks),
        peak=Peak(
            phase=top,
            moment=moment_text(step, top, moment),
            allocated_bytes=process_memory.allocated,
            reserved_bytes=process_memory.reserved,
            process_bytes=process_memory.process,
        ),
        kv_cache_bytes=None if step.training or step.components else step.cache_bytes,
        gpu=None if gpu is None else gpu_fit(job, gpu, step, process_memory.process),
        serving=_serving(job, step, process_memory.process),
        mixed_lengths=_mixed_lengths(setup, process_memory),
        cluster=found_cluster,
        ranks=() if found_cluster is None else tuple(rank_peaks(steps, layout)),
    )


def _mixed_lengths(setup: Setup, memory: ProcessMemory) -> MixedLengths | None:
    if isinstance(setup, InferenceSetup) or setup.lengths is None or memory.counters is None:
        return None
    lengths = [length for step in drawn_lengths(setup) for length in step]
    return MixedLengths(
        distribution=said(setup.lengths),
        seed=setup.seed,
        shortest=min(lengths),
        longest=max(lengths),
        reserved_bytes=memory.counters.by_step,
    )


def _least_free(job: Job, steps: Mapping[int, Step]) -> int:
    """The rank that an estimate reports: the one that holds most, or whose pool of pages leaves least."""
    spec, setup, gpu, _ = job
    if len(steps) > 1 and gpu is not None and isinstance(setup, InferenceSetup) and setup.engine == "vllm":
        from memcalc.report.serving import free_bytes

        return min(steps, key=lambda rank: free_bytes(spec, setup, gpu, steps[rank], 0))
    return most_loaded(steps)


def _serving(job: Job, step: Step, process: int) -> Serving | None:
    """What the GPU serves, where there is one and the job is inference."""
    spec, setup, gpu, _ = job
    if gpu is None or isinstance(setup, TrainingSetup):
        return None
    from memcalc.report.serving import serving_of

    return serving_of(spec, setup, gpu, step, process)
