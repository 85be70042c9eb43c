"""Reports made by hand, for tests of what is shown."""

from typing import Any

from pydantic import BaseModel

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
    Report,
    TrainingPhases,
)

GIB = 2**30
MIB = 2**20


def rebuilt(part: BaseModel, **changes: object) -> Any:
    """A part of a report with other values for some fields, checked anew."""
    return type(part)(**({name: getattr(part, name) for name in type(part).model_fields} | changes))


def lines(report: Report | dict[str, Any]) -> list[str]:
    """The texts of a report's assumptions; a report may be the JSON of one."""
    if isinstance(report, Report):
        return [assumption.text for assumption in report.assumptions]
    return [assumption["text"] for assumption in report["assumptions"]]


def component(parts: dict[str, int], most: int | None = None, ratio: float | None = None) -> Component:
    """A row with these parts."""
    total = sum(parts.values())
    return Component(
        peak_bytes=total,
        max_bytes=total if most is None else most,
        bytes_per_parameter=ratio,
        parts=tuple(Part(name=name, bytes=nbytes) for name, nbytes in parts.items()),
    )


def training_report(**changes: object) -> Report:
    """A job much like `memcalc estimate --params 4B --batch 16`: 4 B parameters in mixed precision with AdamW."""
    components = Components(
        model_weights=component({"fp32 weights": 15 * GIB, "bf16 copies": 7 * GIB + 512 * MIB}, ratio=5.96),
        optimizer_states=component({"fp32 momentum": 15 * GIB, "fp32 variance": 15 * GIB}, ratio=8.0),
        gradients=component({"fp32 gradients": 384 * MIB}, most=15 * GIB, ratio=4.0),
        activations=component({"34 blocks": 20 * GIB, "head": 2 * GIB}),
        temporary_tensors=component({"logits and loss": GIB}, most=2 * GIB),
        other_overhead=component(
            {
                "CUDA context": 704 * MIB,
                "cuBLAS workspaces": 16 * MIB,
                "input batch": 64 * 1024,
                "allocator reserve": 1536 * MIB,
            }
        ),
    )
    process = sum(row.peak_bytes for _, row in components.rows())
    fields: dict[str, object] = {
        "model": Model(
            name="Llama-like",
            family="llama",
            parameters=Parameters(
                total=4_047_191_040, trainable=4_047_191_040, embedding=196_608_000, active=4_047_191_040
            ),
        ),
        "setup": {"mode": "training", "batch": 16, "seq_len": 256, "precision": "mixed-bf16", "optimizer": "adamw"},
        "assumptions": (
            Assumption("sequence_length", "sequence length 256 (default)"),
            Assumption("model_shape", "shape: hidden 3072, 34 blocks, 24 heads, vocabulary 32,000"),
        ),
        "components": components,
        "saved_for_backward_bytes": 22 * GIB,
        "phases": TrainingPhases(
            forward=Phase(peak_bytes=75 * GIB), backward=Phase(peak_bytes=76 * GIB), step=Phase(peak_bytes=61 * GIB)
        ),
        "peak": Peak(
            phase="backward",
            moment="backward of the loss",
            allocated_bytes=process - 2240 * MIB,
            reserved_bytes=process - 704 * MIB,
            process_bytes=process,
        ),
        "kv_cache_bytes": None,
        "gpu": GpuFit(
            name="H100-80GB",
            total_bytes=81559 * MIB,
            usable_bytes=81089 * MIB,
            fits=process <= 81089 * MIB,
            free_bytes=81089 * MIB - process,
        ),
    }
    return Report(**(fields | changes))


def inference_report() -> Report:
    """Serving a small model: no gradients, no optimizer, a KV cache."""
    nothing = component({})
    components = Components(
        model_weights=component({"bf16 weights": 16 * GIB}, ratio=2.0),
        optimizer_states=nothing,
        gradients=nothing,
        activations=nothing,
        temporary_tensors=component({"logits": 256 * MIB}),
        other_overhead=component({"CUDA context": 702 * MIB, "KV cache": GIB, "cuBLAS workspace": 8 * MIB}),
    )
    process = sum(row.peak_bytes for _, row in components.rows())
    return training_report(
        components=components,
        setup={"mode": "inference", "batch": 1, "seq_len": 8192, "dtype": "bf16"},
        assumptions=(),
        saved_for_backward_bytes=None,
        phases=InferencePhases(prefill=Phase(peak_bytes=17 * GIB), decode=Phase(peak_bytes=17 * GIB)),
        peak=Peak(
            phase="prefill",
            moment="the logits",
            allocated_bytes=process - 702 * MIB,
            reserved_bytes=process - 702 * MIB,
            process_bytes=process,
        ),
        kv_cache_bytes=GIB,
        gpu=None,
    )
