"""The whole pipeline: spec and setup, a traced step, the sweep, the report."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from types import NoneType
from typing import TYPE_CHECKING, TypeVar

from memcalc.autograd.tape import GRADIENTS, OPTIMIZER, OVERHEAD, ROWS, WEIGHTS
from memcalc.breakdown import BREAKDOWN
from memcalc.breakdown.process_memory import ProcessMemory
from memcalc.breakdown.temporary_tensors import LOAD
from memcalc.common.arguments import check_type
from memcalc.common.assumption import Assumption
from memcalc.errors import TooLongError, UsageError
from memcalc.models.build import build
from memcalc.models.registry import family
from memcalc.models.spec import ModelSpec
from memcalc.nn.parameter_counts import inactive_parameters
from memcalc.nn.state_space_kernels import has_mixers
from memcalc.parallel.layout import layout_of
from memcalc.parallel.setup import SINGLE, ParallelSetup
from memcalc.peak.ranks import phase_totals, traced_ranks, with_loading
from memcalc.peak.sweep import Moment, swept
from memcalc.report.assumptions import assumed
from memcalc.report.cluster import assumed_of_cluster, cluster, communicators, rank_peaks
from memcalc.report.schema import (
    Component,
    Components,
    EncodingTrainingPhases,
    GpuFit,
    InferencePhases,
    Model,
    Parameters,
    Part,
    Peak,
    Phase,
    PipelinePhases,
    Report,
    Serving,
    TrainingPhases,
)
from memcalc.setup.setup import InferenceSetup, TrainingSetup
from memcalc.training.prepare_model import adapt
from memcalc.training.traced_step import Step
from memcalc.units import format_bytes

if TYPE_CHECKING:
    from memcalc.tables.gpus import Gpu

Setup = TrainingSetup | InferenceSetup
Ran = TypeVar("Ran")

_PER_PARAMETER = (WEIGHTS, OPTIMIZER, GRADIENTS)
"""Rows whose size grows with the parameters and with nothing else."""


def estimate(
    spec: ModelSpec,
    setup: TrainingSetup | InferenceSetup,
    gpu: Gpu | str | None = None,
    *,
    assumptions: Sequence[Assumption] = (),
    teacher: ModelSpec | None = None,
) -> Report:
    """The memory that one optimizer step, or prefill and one decoded token, needs on one GPU.

    Args:
        spec: the model.
        setup: what is run.
        gpu: the GPU to fit, or its name or size as `find_gpu` takes them.
        assumptions: what the caller has assumed, to be said in the report.
        teacher: the model that distillation asks.

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
    steps, layout = _run(spec, setup, teacher, gpu)
    rank = _most_loaded(steps)
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
    process_memory = ProcessMemory.for_job(step.input_bytes, setup, gpu, totals[top], communicators(layout))
    rows = _rows_at_peak(phases[top], {} if moment is None else sweep.live_at(moment), process_memory)
    maxima = _maxima(phases, highest, process_memory)
    parameters = _parameters(step, spec, layout)
    components = {
        row: Component(
            peak_bytes=sum_parts(parts),
            max_bytes=max(maxima[row], sum_parts(parts)),
            bytes_per_parameter=maxima[row] / max(parameters.total, 1) if row in _PER_PARAMETER else None,
            parts=tuple(Part(name=name, bytes=nbytes) for name, nbytes in parts.items() if nbytes),
        )
        for row, parts in rows.items()
    }
    found_cluster = None
    if isinstance(setup, TrainingSetup) and layout.gpus > 1:
        found_cluster = cluster(setup, layout, rank, step)
    peaks = {phase: Phase(peak_bytes=total) for phase, total in totals.items()}
    return Report(
        model=Model(name=spec.name, family=spec.model_type, parameters=parameters),
        setup=step.resolved() | process_memory.resolved(),
        assumptions=(
            *spec.assumptions,
            *assumptions,
            *assumed(spec, setup, step),
            *_elsewhere(step, rows[WEIGHTS]),
            *_quantization_note(spec, setup, process_memory.allocated, teacher),
            *_attended(spec, setup, step, teacher),
            *_without_kernels(spec, setup, step, teacher),
            *(() if found_cluster is None else assumed_of_cluster(layout, found_cluster)),
            *process_memory.assumptions(),
            *((gpu.note,) if gpu is not None and gpu.note else ()),
        ),
        components=Components(**components),
        saved_for_backward_bytes=sweep.saved_for_backward(step.forward_end) if step.training else None,
        phases=_phases(step, peaks),
        peak=Peak(
            phase=top,
            moment=moment_text(step, top, moment),
            allocated_bytes=process_memory.allocated,
            reserved_bytes=process_memory.reserved,
            process_bytes=process_memory.process,
        ),
        kv_cache_bytes=None if step.training or step.components else step.cache_bytes,
        gpu=None if gpu is None else _gpu_fit(spec, setup, gpu, step, process_memory.process),
        serving=_serving(spec, setup, gpu, step),
        cluster=found_cluster,
        ranks=() if found_cluster is None else tuple(rank_peaks(steps, layout)),
    )


def _phases(step: Step, peaks: dict[str, Phase]) -> TrainingPhases | InferencePhases | PipelinePhases:
    if step.training:
        return EncodingTrainingPhases(**peaks) if "encode" in peaks else TrainingPhases(**peaks)
    return PipelinePhases(**peaks) if "denoise" in peaks else InferencePhases(**peaks)


def _elsewhere(step: Step, weights: Mapping[str, int]) -> Iterator[Assumption]:
    """The components of a pipeline that are not on the GPU at the peak, or not wholly."""
    away = [
        f"{name} ({format_bytes(nbytes - weights.get(name, 0))})"
        for name, nbytes in step.components.items()
        if weights.get(name, 0) < nbytes
    ]
    if away:
        text = f"at the peak these weights are in host memory: {', '.join(away)} (--cpu-offload)"
        yield Assumption("components_in_host_memory", text)


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
    peak = max(phase_totals(step).values())
    process = ProcessMemory.for_job(step.input_bytes, setup, gpu, peak, communicators(layout)).process
    if isinstance(setup, TrainingSetup):
        return process
    return usable_bytes(setup, gpu) - _gpu_fit(spec, setup, gpu, step, process).free_bytes


def usable_bytes(setup: TrainingSetup | InferenceSetup, gpu: Gpu) -> int:
    """Bytes of the GPU that the job may take."""
    if isinstance(setup, TrainingSetup):
        return gpu.usable_bytes
    from memcalc.inference.serving import usable

    return usable(setup, gpu)


def most_loaded_step(spec: ModelSpec, setup: TrainingSetup | InferenceSetup, teacher: ModelSpec | None = None) -> Step:
    """The traced step that `estimate` reports: that of the rank that holds most."""
    steps, _ = _run(spec, setup, teacher, None)
    return steps[_most_loaded(steps)]


def _most_loaded(steps: Mapping[int, Step]) -> int:
    if len(steps) == 1:
        return min(steps)
    return max(steps, key=lambda rank: max(phase_totals(steps[rank]).values()))


def _quantization_note(
    spec: ModelSpec, setup: TrainingSetup | InferenceSetup, allocated: int, teacher: ModelSpec | None
) -> Iterator[Assumption]:
    """A line where quantizing the base of adapters takes more than it saves."""
    if not isinstance(setup, TrainingSetup) or setup.quantization == "none" or setup.lora_rank is None:
        return
    unquantized = estimate(
        spec, setup.model_copy(update={"quantization": "none", "quantize_moe_experts": "none"}), teacher=teacher
    ).peak.allocated_bytes
    if unquantized < allocated:
        yield Assumption(
            "quantization_raises_peak",
            f"quantizing raises the peak here: without --quantization {unquantized:,} bytes would be allocated"
            f"{', and --no-prepare-kbit-training leaves out fp32 copies' if setup.prepare_kbit_training else ''}",
        )


def _attended(
    spec: ModelSpec, setup: TrainingSetup | InferenceSetup, step: Step, teacher: ModelSpec | None
) -> Iterator[Assumption]:
    """How a model attends whose code is its repository's own, and what the other way would take."""
    if not family(spec.model_type).attention_assumed or "attention" in setup.model_fields_set:
        return
    used = step.resolved()["attention"]
    eager = estimate(spec, setup.model_copy(update={"attention": "eager"}), teacher=teacher)
    if used != "eager" and eager.setup["attention"] == "eager":
        yield Assumption(
            "attention_of_own_code",
            f"attention is assumed: the code of {spec.model_type} is its repository's own, and is taken to attend "
            f"as Transformers' {used}; with eager attention {format_bytes(eager.peak.allocated_bytes)} would be "
            "allocated (--attention)",
        )


def _without_kernels(
    spec: ModelSpec, setup: TrainingSetup | InferenceSetup, step: Step, teacher: ModelSpec | None
) -> Iterator[Assumption]:
    """What the kernels of mamba-ssm would take, where nobody said whether they are installed."""
    if "state_space_kernels" in setup.model_fields_set or not has_mixers(step.network):
        return
    with suppress(UsageError):  # weights that the kernels cannot take
        fused = estimate(spec, setup.model_copy(update={"state_space_kernels": "mamba-ssm"}), teacher=teacher)
        yield Assumption(
            "state_space_kernels_alternative",
            f"with mamba-ssm's kernels {format_bytes(fused.peak.allocated_bytes)} would be allocated "
            "(--state-space-kernels mamba-ssm)",
        )


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
        if setup.seq_len is not None or problem.longest <= later:
            raise
        shorter = setup.model_copy(update={"seq_len": problem.longest - later})
    return run(shorter)


def _traced(
    spec: ModelSpec, setup: TrainingSetup | InferenceSetup, teacher: ModelSpec | None, gpu: Gpu | None
) -> tuple[dict[int, Step], ParallelSetup]:
    if teacher is not None and not (isinstance(setup, TrainingSetup) and setup.objective in ("distillation", "gkd")):
        raise UsageError("--teacher belongs to --objective distillation or gkd of --mode training; leave it out.")
    if isinstance(setup, TrainingSetup):
        layout = layout_of(setup, spec.config)
        return traced_ranks(spec, setup, layout, teacher), layout
    from memcalc.inference.generate import generate  # training, the default, does not pay for importing it
    from memcalc.inference.served_model import served_model

    return {0: with_loading(generate(spec, setup, served_model(spec, setup, gpu)))}, SINGLE


def _gpu_fit(spec: ModelSpec, setup: TrainingSetup | InferenceSetup, gpu: Gpu, step: Step, process: int) -> GpuFit:
    """How a process of `process` bytes fits what the job may take; what vLLM leaves of its pool is what is free."""
    usable = usable_bytes(setup, gpu)
    if isinstance(setup, InferenceSetup):
        from memcalc.report.serving import free_bytes

        usable = max(0, process + free_bytes(spec, setup, gpu, step, process))
    return GpuFit.of(gpu.name, gpu.total_bytes, usable, process)


def _serving(spec: ModelSpec, setup: TrainingSetup | InferenceSetup, gpu: Gpu | None, step: Step) -> Serving | None:
    """What the GPU serves, where there is one and the job is inference."""
    if gpu is None or isinstance(setup, TrainingSetup):
        return None
    from memcalc.report.serving import serving_of

    return serving_of(spec, setup, gpu, step)


def sum_parts(parts: Mapping[str, int]) -> int:
    """Bytes of all parts of a row."""
    return sum(parts.values())


def standing_parts(step: Step, phase: str) -> dict[str, dict[str, int]]:
    """What stands in each row during `phase` besides the tape."""
    return {row: dict(parts(step, phase)) for row, parts in BREAKDOWN.items()}


def _rows_at_peak(
    standing: Mapping[str, Mapping[str, int]], live: Mapping[tuple[str, str], int], process_memory: ProcessMemory
) -> dict[str, dict[str, int]]:
    """Parts of each row at the peak, the largest first."""
    rows = {row: dict(standing[row]) for row in ROWS}
    for (row, name), nbytes in live.items():
        rows[row][name] = rows[row].get(name, 0) + nbytes
    for name, nbytes in process_memory.parts():
        rows[OVERHEAD][name] = rows[OVERHEAD].get(name, 0) + nbytes
    return {row: dict(sorted(parts.items(), key=lambda part: -part[1])) for row, parts in rows.items()}


def _maxima(
    phases: Mapping[str, Mapping[str, Mapping[str, int]]],
    highest: Mapping[str, Sequence[int]],
    process_memory: ProcessMemory,
) -> dict[str, int]:
    """The most that each row holds in any phase."""
    maxima = {
        row: max(
            sum_parts(rows[row]) + (highest[phase][index] if phase in highest else 0) for phase, rows in phases.items()
        )
        for index, row in enumerate(ROWS)
    }
    maxima[OVERHEAD] += sum(nbytes for _, nbytes in process_memory.parts())
    return maxima


def _parameters(step: Step, spec: ModelSpec, layout: ParallelSetup) -> Parameters:
    total, trainable, embedding = sum(part.parameters for part in spec.components) if step.components else 0, 0, 0
    if layout.tensor * layout.pipeline > 1 and isinstance(step.setup, TrainingSetup):
        whole = build(spec)
        adapt(whole, spec, step.setup)
        step = replace(step, network=whole, tensors=tuple(whole.tensors()))
    for _, parameter in step.parameters:
        count = parameter.count * parameter.copies
        total += count
        trainable += count if step.training and parameter.trainable else 0
        embedding += count if parameter.group in ("embedding", "LM head") and len(parameter.shape) > 1 else 0
    return Parameters(
        total=total, trainable=trainable, embedding=embedding, active=total - inactive_parameters(step.network)
    )


def moment_text(step: Step, phase: str, moment: Moment | None) -> str:
    """The moment of the peak in words."""
    if phase == LOAD:
        return "loading of the weights"
    if moment is None and not step.training:
        return f"{phase}, weights alone"
    if moment is None:
        return "optimizer step"
    if moment.block is not None and moment.position is not None:
        return f"{phase} of {moment.block.stack} {moment.position + 1} of {moment.block.depth}"
    scope = step.tape.allocations[moment.tick].name
    return f"{phase} of {step.running[phase]}, {scope}" if phase in step.running else f"{phase} of {scope}"
