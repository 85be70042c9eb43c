"""The whole pipeline: spec and setup, a traced step, the sweep, the report."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import NoneType
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from memcalc.allocator.simulated_jobs import not_simulated
from memcalc.autograd.tape import WEIGHTS
from memcalc.breakdown.process_memory import ProcessMemory
from memcalc.common.arguments import check_type
from memcalc.common.assumption import Assumption
from memcalc.errors import TooLongError, UsageError
from memcalc.models.registry import autoencoders, denoisers
from memcalc.models.spec import ModelSpec
from memcalc.parallel.layout import free_bytes, layout_of
from memcalc.parallel.setup import SINGLE, ParallelSetup
from memcalc.peak.ranks import cards_of, phase_totals, traced_ranks, with_loading
from memcalc.peak.sweep import swept
from memcalc.report.alternatives import alternatives
from memcalc.report.assumptions import assumed
from memcalc.report.cluster import assumed_of_cluster, cluster, communicators, rank_peaks
from memcalc.report.gpu_schema import GpuFit, Serving
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
from memcalc.tables.cuda_devices import cuda_device
from memcalc.training.float8 import check_float8
from memcalc.training.traced_step import PLAIN, Step, Tracing

if TYPE_CHECKING:
    from memcalc.tables.gpus import Gpu

Setup = TrainingSetup | InferenceSetup
Ran = TypeVar("Ran")


class Job(NamedTuple):
    """A model, what is run, the GPU to fit if one is named, and the model that distillation asks."""

    spec: ModelSpec
    setup: Setup
    gpu: Gpu | None
    teacher: ModelSpec | None = None


def estimate(
    spec: ModelSpec,
    setup: TrainingSetup | InferenceSetup,
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
    gpu = None if gpu is None else _found(gpu)
    if gpu is not None and isinstance(setup, TrainingSetup) and setup.float8_recipe != "none":
        check_float8(gpu)
    steps, layout = _run(spec, setup, teacher, gpu)
    rank = _least_free(spec, setup, gpu, steps)
    step = steps[rank]
    if layout.context > 1:
        steps, layout = {rank: step}, replace(layout, context_rank=rank)
    sweep, found, highest = swept(step.tape)
    phases = {phase: standing_parts(step, phase) for phase in step.phases}
    totals = {phase: sum(map(sum_parts, rows.values())) for phase, rows in phases.items()}
    for phase in totals.keys() & found.keys():
        totals[phase] += found[phase][0]
    top = max(step.phases, key=lambda phase: totals[phase])
    moment = found[top][1] if top in found else None
    job = Job(spec, setup, gpu, teacher)
    process_memory = process_memory_of(job, step, totals[top], layout, simulate=simulate, advise=True)
    rows = rows_at_peak(phases[top], {} if moment is None else sweep.live_at(moment), process_memory)
    parameters = parameters_of(step, spec, layout)
    found_cluster = None
    if layout.gpus > 1 or layout.device_map is not None:
        found_cluster = cluster(setup, layout, rank, step)
    peaks = {phase: Phase(peak_bytes=total) for phase, total in totals.items()}
    return Report(
        model=Model(name=spec.name, family=spec.model_type, parameters=parameters),
        setup=step.resolved() | process_memory.resolved() | _frames(setup),
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
        gpu=None if gpu is None else _gpu_fit(spec, setup, gpu, step, process_memory.process),
        serving=_serving(spec, setup, gpu, step, process_memory.process),
        mixed_lengths=_mixed_lengths(setup, process_memory),
        cluster=found_cluster,
        ranks=() if found_cluster is None else tuple(rank_peaks(steps, layout)),
    )


def _frames(setup: Setup) -> dict[str, int]:
    """The frames that were asked for, where the step has them as images."""
    return {} if setup.num_frames is None else {"num_frames": setup.num_frames}


def _found(gpu: Gpu | str) -> Gpu:
    """The GPU that is meant. Raises UsageError."""
    from memcalc.tables.gpus import Gpu, find_gpu

    check_type("gpu", gpu, (Gpu, str), "a GPU's name or size, or what find_gpu gives")
    return find_gpu(gpu) if isinstance(gpu, str) else gpu


def process_bytes(
    spec: ModelSpec, setup: TrainingSetup | InferenceSetup, gpu: Gpu, teacher: ModelSpec | None = None
) -> int:
    """The bytes that have to be within `usable_bytes`, and nothing else: what a search asks. Raises MemcalcError."""
    steps, layout = _run(spec, setup, teacher, gpu)
    step = steps[_most_loaded(steps)]
    process = process_memory_of(Job(spec, setup, gpu, teacher), step, max(phase_totals(step).values()), layout).process
    if isinstance(setup, TrainingSetup):
        return process
    return usable_bytes(setup, gpu) - _gpu_fit(spec, setup, gpu, step, process).free_bytes


def process_memory_of(
    job: Job, step: Step, tensors: int, layout: ParallelSetup, *, simulate: bool = True, advise: bool = False
) -> ProcessMemory:
    """What the process of a traced step holds, whose tensors peak at `tensors` bytes. Raises UsageError."""
    spec, setup, gpu, teacher = job
    memory = ProcessMemory.for_job(step.input_bytes, setup, gpu, tensors, communicators(layout))
    if setup.allocator_reserve is not None:
        if setup.alloc_conf is not None:
            raise UsageError(
                "--allocator-reserve says what the allocator holds, which --alloc-conf has simulated; leave one out."
            )
        return memory
    why = not_simulated(step, setup, gpu)
    if why is not None and setup.alloc_conf is not None:
        raise UsageError(f"--alloc-conf sets up PyTorch's allocator, but {why}; leave it out.")
    lengths = setup.lengths if isinstance(setup, TrainingSetup) else None
    if why is not None and lengths is not None:
        raise UsageError(
            f"--lengths simulates PyTorch's allocator, and {why}; give --seq-len with the longest length in its place."
        )
    limit = None if gpu is None else usable_bytes(setup, gpu) - memory.context - memory.nccl
    if limit is not None and memory.counted > limit and (setup.alloc_conf, lengths) == (None, None):
        why = why or "not simulated: no allocator makes its tensors fit"
    if why is not None or not simulate:
        return memory.with_counters(None, why or "not simulated here")
    from memcalc.allocator.job import counters

    return memory.with_counters(counters(spec, step, gpu, limit, teacher=teacher, advise=advise))


def needed_bytes(spec: ModelSpec, setup: Setup, gpu: Gpu, teacher: ModelSpec | None = None) -> int | None:
    """Bytes of the smallest GPU like `gpu` on which a job runs, CUDA context included; None if that is not simulated.

    Raises MemcalcError.
    """
    from memcalc.allocator.job import needed

    steps, layout = _run(spec, setup, teacher, gpu)
    step = steps[_most_loaded(steps)]
    if setup.allocator_reserve is not None or not_simulated(step, setup, gpu) is not None:
        return None
    memory = ProcessMemory.for_job(step.input_bytes, setup, gpu, 0, communicators(layout))
    return needed(spec, step, gpu, teacher) + memory.context + memory.nccl


def with_needed_bytes(
    report: Report, spec: ModelSpec, setup: Setup, gpu: Gpu, teacher: ModelSpec | None = None
) -> Report:
    """The report of a job with the smallest memory on which it runs, for which it is simulated some ten times more."""
    assert report.gpu is not None
    found = report.gpu.model_copy(update={"needed_bytes": needed_bytes(spec, setup, gpu, teacher)})
    return report.model_copy(update={"gpu": found})


def usable_bytes(setup: TrainingSetup | InferenceSetup, gpu: Gpu) -> int:
    """Bytes of the GPU that the job may take."""
    if isinstance(setup, TrainingSetup):
        return gpu.usable_bytes
    from memcalc.inference.serving import usable

    return usable(setup, gpu)


def most_loaded_step(
    spec: ModelSpec,
    setup: TrainingSetup | InferenceSetup,
    teacher: ModelSpec | None = None,
    gpu: Gpu | str | None = None,
) -> Step:
    """The traced step that `estimate` reports: that of the rank that holds most."""
    steps, _ = _run(spec, setup, teacher, None if gpu is None else _found(gpu))
    return steps[_most_loaded(steps)]


def _most_loaded(steps: Mapping[int, Step]) -> int:
    if len(steps) == 1:
        return min(steps)
    return max(steps, key=lambda rank: max(phase_totals(steps[rank]).values()))


def _run(
    spec: ModelSpec, setup: TrainingSetup | InferenceSetup, teacher: ModelSpec | None, gpu: Gpu | None
) -> tuple[dict[int, Step], ParallelSetup]:
    """The traced steps of the ranks that differ."""
    return within_positions(setup, lambda setup: _traced(spec, setup, teacher, gpu))


def within_positions(setup: Setup, run: Callable[[Setup], Ran]) -> Ran:
    """What `run` makes of a setup, whose length is no more than the model has positions for where nobody named it."""
    try:
        return run(setup)
    except TooLongError as problem:
        later = setup.max_new_tokens - 1 if isinstance(setup, InferenceSetup) else 0
        many = isinstance(setup, TrainingSetup) and setup.lengths is not None
        if setup.seq_len is not None or many or problem.longest <= later:
            raise
        shorter = setup.model_copy(update={"seq_len": problem.longest - later})
    return run(shorter)


def _traced(
    spec: ModelSpec, setup: TrainingSetup | InferenceSetup, teacher: ModelSpec | None, gpu: Gpu | None
) -> tuple[dict[int, Step], ParallelSetup]:
    if teacher is not None and not (isinstance(setup, TrainingSetup) and setup.objective in ("distillation", "gkd")):
        raise UsageError("--teacher belongs to --objective distillation or gkd of --mode training; leave it out.")
    if isinstance(setup, TrainingSetup):
        layout = layout_of(setup, spec.config, None if gpu is None else free_bytes(setup, gpu))
        return traced_ranks(spec, setup, layout, teacher), layout
    from memcalc.inference.generate import generate  # training, the default, does not pay for importing it
    from memcalc.inference.served_model import served_model
    from memcalc.inference.served_ranks import served_ranks

    if setup.pipeline_parallel_size > 1 or setup.tensor_parallel_size > 1 or (setup.data_parallel_size or 1) > 1:
        return served_ranks(spec, setup, gpu)
    step = generate(spec, setup, served_model(spec, setup, gpu), tracing=tracing_of_pipeline(spec, gpu))
    layout = SINGLE if step.placement is None else ParallelSetup(device_map=step.placement.ask)
    return {card: with_loading(own) for card, own in cards_of(step).items()}, layout


def tracing_of_pipeline(spec: ModelSpec, gpu: Gpu | None) -> Tracing:
    """How a diffusion pipeline's call is traced: with the kernels of the GPU that was named. Other models have none."""
    if gpu is None or spec.model_type not in (*denoisers(), *autoencoders()):
        return PLAIN
    return Tracing(cuda_device(gpu.name, gpu.compute_capability))


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


def _least_free(spec: ModelSpec, setup: Setup, gpu: Gpu | None, steps: Mapping[int, Step]) -> int:
    """The rank that an estimate reports: the one that holds most, or whose pool of pages leaves least."""
    if len(steps) > 1 and gpu is not None and isinstance(setup, InferenceSetup) and setup.engine == "vllm":
        from memcalc.report.serving import free_bytes

        return min(steps, key=lambda rank: free_bytes(spec, setup, gpu, steps[rank], 0))
    return _most_loaded(steps)


def _gpu_fit(spec: ModelSpec, setup: Setup, gpu: Gpu, step: Step, process: int) -> GpuFit:
    """How a process of `process` bytes fits what the job may take; what vLLM leaves of its pool is what is free."""
    usable = usable_bytes(setup, gpu)
    if isinstance(setup, InferenceSetup):
        from memcalc.report.serving import free_bytes

        usable = max(0, process + free_bytes(spec, setup, gpu, step, process))
    return GpuFit.of(gpu.name, gpu.total_bytes, usable, process)


def _serving(spec: ModelSpec, setup: Setup, gpu: Gpu | None, step: Step, process: int) -> Serving | None:
    """What the GPU serves, where there is one and the job is inference."""
    if gpu is None or isinstance(setup, TrainingSetup):
        return None
    from memcalc.report.serving import serving_of

    return serving_of(spec, setup, gpu, step, process)
