"""Diffusion pipelines: several models in one process. Their weights are counted; what they compute is out of scope."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from memcalc.breakdown.process_memory import ProcessMemory
from memcalc.common.assumption import Assumption
from memcalc.report.gpu_schema import GpuFit
from memcalc.report.schema import (
    Component,
    Components,
    InferencePhases,
    Model,
    Parameters,
    Part,
    Peak,
    Phase,
    PipelinePhases,
    Report,
)
from memcalc.setup.setup import InferenceSetup
from memcalc.tables.gpus import Gpu
from memcalc.units import format_bytes

Stage = Literal["encode", "denoise", "decode"]
"""What a component does: it reads the prompt, denoises, or makes the picture."""

STAGES: tuple[Stage, ...] = ("encode", "denoise", "decode")


@dataclass(frozen=True)
class ComponentWeights:
    """One model of a pipeline: bytes of its weights, its parameters, and the stage at which it works."""

    name: str
    stage: Stage
    nbytes: int
    parameters: int


def estimate_components(
    name: str,
    parts: Sequence[ComponentWeights],
    setup: InferenceSetup,
    gpu: Gpu | None,
    assumptions: Sequence[Assumption] = (),
) -> Report:
    """The weights of all components, resident together at every stage, as `pipe.to("cuda")` has them."""
    resident = Phase(peak_bytes=sum(part.nbytes for part in parts))
    phases = PipelinePhases(encode=resident, denoise=resident, vae_decode=resident)
    peak = ("denoise", "all components resident, weights only")
    lines = (*assumptions, *_offloaded(parts))
    return _weights_report(name, "diffusion pipeline", parts, setup, gpu, lines, phases, peak)


def estimate_weights(
    name: str,
    family: str,
    weights: ComponentWeights,
    setup: InferenceSetup,
    gpu: Gpu | None,
    assumptions: Sequence[Assumption],
) -> Report:
    """The weights of a model whose computation is not described."""
    resident = Phase(peak_bytes=weights.nbytes)
    phases = InferencePhases(prefill=resident, decode=resident)
    return _weights_report(name, family, [weights], setup, gpu, assumptions, phases, ("prefill", "weights only"))


def _weights_report(  # noqa: PLR0913 (what differs between two reports of weights)
    name: str,
    family: str,
    parts: Sequence[ComponentWeights],
    setup: InferenceSetup,
    gpu: Gpu | None,
    assumptions: Sequence[Assumption],
    phases: PipelinePhases | InferencePhases,
    peak: tuple[str, str],
) -> Report:
    total = sum(part.nbytes for part in parts)
    parameters = sum(part.parameters for part in parts)
    process_memory = ProcessMemory.for_job(0, setup, gpu, total)
    weights = {part.name: part.nbytes for part in sorted(parts, key=lambda part: -part.nbytes)}
    empty = _row({}, None)
    return Report(
        model=Model(
            name=name,
            family=family,
            parameters=Parameters(total=parameters, trainable=0, embedding=0, active=parameters),
        ),
        setup={"mode": "inference", **process_memory.resolved()},
        assumptions=(
            *assumptions,
            *process_memory.assumptions(),
            *((gpu.note,) if gpu is not None and gpu.note else ()),
        ),
        components=Components(
            model_weights=_row(weights, total / max(parameters, 1)),
            optimizer_states=empty,
            gradients=empty,
            activations=empty,
            temporary_tensors=empty,
            other_overhead=_row(dict(process_memory.parts()), None),
        ),
        saved_for_backward_bytes=None,
        phases=phases,
        peak=Peak(
            phase=peak[0],
            moment=peak[1],
            allocated_bytes=process_memory.allocated,
            reserved_bytes=process_memory.reserved,
            process_bytes=process_memory.process,
        ),
        kv_cache_bytes=None,
        gpu=None if gpu is None else GpuFit.of(gpu.name, gpu.total_bytes, gpu.usable_bytes, process_memory.process),
    )


def _row(parts: dict[str, int], ratio: float | None) -> Component:
    total = sum(parts.values())
    shown = tuple(Part(name=name, bytes=nbytes) for name, nbytes in parts.items() if nbytes)
    return Component(peak_bytes=total, max_bytes=total, bytes_per_parameter=ratio, parts=shown)


def _offloaded(parts: Sequence[ComponentWeights]) -> list[Assumption]:
    """What is resident when, if each component is moved to the GPU only while it works."""
    lines = []
    for stage in STAGES:
        working = [part for part in parts if part.stage == stage]
        if working:
            largest = max(working, key=lambda part: part.nbytes)
            lines.append(f"{stage} {largest.name} {format_bytes(largest.nbytes)}")
    return [
        Assumption(
            "components_resident",
            f"all components are resident; with model offload one at a time, at most: {', '.join(lines)}",
        )
    ]
