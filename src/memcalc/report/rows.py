"""From a traced step to the rows of its report: what stands, what is alive at the peak, and how it is called."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from memcalc.autograd.tape import GRADIENTS, OPTIMIZER, OVERHEAD, ROWS, WEIGHTS
from memcalc.breakdown import BREAKDOWN
from memcalc.breakdown.process_memory import ProcessMemory
from memcalc.breakdown.temporary_tensors import LOAD
from memcalc.common.assumption import Assumption
from memcalc.models.build import build
from memcalc.models.spec import ModelSpec
from memcalc.nn.parameter_counts import inactive_parameters
from memcalc.parallel.setup import ParallelSetup
from memcalc.peak.sweep import Moment
from memcalc.report.schema import (
    Component,
    Components,
    EncodingTrainingPhases,
    InferencePhases,
    Parameters,
    Part,
    Phase,
    PipelinePhases,
    TrainingPhases,
)
from memcalc.setup.setup import TrainingSetup
from memcalc.training.prepare_model import adapt
from memcalc.training.traced_step import Step
from memcalc.units import format_bytes

_PER_PARAMETER = (WEIGHTS, OPTIMIZER, GRADIENTS)
"""Rows whose size grows with the parameters and with nothing else."""


def sum_parts(parts: Mapping[str, int]) -> int:
    """Bytes of all parts of a row."""
    return sum(parts.values())


def standing_parts(step: Step, phase: str) -> dict[str, dict[str, int]]:
    """What stands in each row during `phase` besides the tape."""
    return {row: dict(parts(step, phase)) for row, parts in BREAKDOWN.items()}


def rows_at_peak(
    standing: Mapping[str, Mapping[str, int]], live: Mapping[tuple[str, str], int], process_memory: ProcessMemory
) -> dict[str, dict[str, int]]:
    """Parts of each row at the peak, the largest first."""
    rows = {row: dict(standing[row]) for row in ROWS}
    for (row, name), nbytes in live.items():
        rows[row][name] = rows[row].get(name, 0) + nbytes
    for name, nbytes in process_memory.parts():
        rows[OVERHEAD][name] = rows[OVERHEAD].get(name, 0) + nbytes
    return {row: dict(sorted(parts.items(), key=lambda part: -part[1])) for row, parts in rows.items()}


def maxima(
    phases: Mapping[str, Mapping[str, Mapping[str, int]]],
    highest: Mapping[str, Sequence[int]],
    process_memory: ProcessMemory,
) -> dict[str, int]:
    """The most that each row holds in any phase."""
    most = {
        row: max(
            sum_parts(rows[row]) + (highest[phase][index] if phase in highest else 0) for phase, rows in phases.items()
        )
        for index, row in enumerate(ROWS)
    }
    most[OVERHEAD] += sum(nbytes for _, nbytes in process_memory.parts())
    return most


def parameters_of(step: Step, spec: ModelSpec, layout: ParallelSetup) -> Parameters:
    """Counts of the whole model's parameters."""
    total, trainable, embedding = sum(part.parameters for part in spec.components) if step.components else 0, 0, 0
    if layout.device_map is not None or layout.tensor * layout.pipeline * layout.expert > 1:
        whole = build(spec)
        if isinstance(step.setup, TrainingSetup):
            adapt(whole, spec, step.setup)
        step = replace(step, network=whole, tensors=tuple(whole.tensors()))
    for _, parameter in step.parameters:
        count = parameter.count * parameter.copies
        total += count
        trainable += count if step.training and parameter.trainable and not parameter.keeps_gradient else 0
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


def phases_of(step: Step, peaks: dict[str, Phase]) -> TrainingPhases | InferencePhases | PipelinePhases:
    """The peaks of the phases of a job, by its kind."""
    if step.training:
        return EncodingTrainingPhases(**peaks) if "encode" in peaks else TrainingPhases(**peaks)
    return PipelinePhases(**peaks) if "denoise" in peaks else InferencePhases(**peaks)


def elsewhere(step: Step, weights: Mapping[str, int]) -> Iterator[Assumption]:
    """The components of a pipeline that are not on the GPU at the peak, or not wholly."""
    away = [
        f"{name} ({format_bytes(nbytes - weights.get(name, 0))})"
        for name, nbytes in step.components.items()
        if weights.get(name, 0) < nbytes
    ]
    if away:
        text = f"at the peak these weights are in host memory: {', '.join(away)} (--cpu-offload)"
        yield Assumption("components_in_host_memory", text)


def components_of(rows: Mapping[str, Mapping[str, int]], most: Mapping[str, int], parameters: Parameters) -> Components:
    """The rows of the box: their `rows` at the peak, and the `most` that each holds at any moment."""
    return Components(
        **{
            row: Component(
                peak_bytes=sum_parts(parts),
                max_bytes=max(most[row], sum_parts(parts)),
                bytes_per_parameter=most[row] / max(parameters.total, 1) if row in _PER_PARAMETER else None,
                parts=tuple(Part(name=name, bytes=nbytes) for name, nbytes in parts.items() if nbytes),
            )
            for row, parts in rows.items()
        }
    )
