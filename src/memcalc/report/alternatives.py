"""What the same job would take otherwise, where that is worth a line: each asks for the estimate of another setup."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress

from memcalc.common.assumption import Assumption
from memcalc.errors import UsageError
from memcalc.models.registry import family
from memcalc.models.spec import ModelSpec
from memcalc.nn.state_space_kernels import LinearAttentionMixer, StateSpaceMixer, has_mixers
from memcalc.report.schema import Report
from memcalc.setup.setup import InferenceSetup, TrainingSetup
from memcalc.training.traced_step import Step
from memcalc.units import format_bytes

_Estimate = Callable[[TrainingSetup | InferenceSetup], Report]


def alternatives(
    spec: ModelSpec, setup: TrainingSetup | InferenceSetup, step: Step, allocated: int, other: _Estimate
) -> Iterator[Assumption]:
    """Lines about other ways to run a job that allocates `allocated` bytes; `other` estimates the same model."""
    yield from _quantization(setup, allocated, other)
    yield from _attended(spec, setup, step, other)
    yield from _without_kernels(setup, step, other)


def _quantization(setup: TrainingSetup | InferenceSetup, allocated: int, other: _Estimate) -> Iterator[Assumption]:
    """A line where quantizing the base of adapters takes more than it saves."""
    if not isinstance(setup, TrainingSetup) or setup.quantization == "none" or setup.lora_rank is None:
        return
    unquantized = other(
        setup.model_copy(update={"quantization": "none", "quantize_moe_experts": "none"})
    ).peak.allocated_bytes
    if unquantized < allocated:
        yield Assumption(
            "quantization_raises_peak",
            f"quantizing raises the peak here: without --quantization {unquantized:,} bytes would be allocated"
            f"{', and --no-prepare-kbit-training leaves out fp32 copies' if setup.prepare_kbit_training else ''}",
        )


def _attended(
    spec: ModelSpec, setup: TrainingSetup | InferenceSetup, step: Step, other: _Estimate
) -> Iterator[Assumption]:
    """How a model attends whose code is its repository's own, and what the other way would take."""
    if not family(spec.model_type).attention_assumed or "attention" in setup.model_fields_set:
        return
    used = step.resolved()["attention"]
    eager = other(setup.model_copy(update={"attention": "eager"}))
    if used != "eager" and eager.setup["attention"] == "eager":
        yield Assumption(
            "attention_of_own_code",
            f"attention is assumed: the code of {spec.model_type} is its repository's own, and is taken to attend "
            f"as Transformers' {used}; with eager attention {format_bytes(eager.peak.allocated_bytes)} would be "
            "allocated (--attention)",
        )


def _without_kernels(setup: TrainingSetup | InferenceSetup, step: Step, other: _Estimate) -> Iterator[Assumption]:
    """What kernels of other packages would take, where nobody said whether they are installed."""
    for field, library, kernels, kind in (
        ("state_space_kernels", "mamba-ssm", "mamba-ssm", StateSpaceMixer),
        ("linear_attention_kernels", "flash-linear-attention", "fla", LinearAttentionMixer),
    ):
        if field in setup.model_fields_set or not has_mixers(step.network, kind):
            continue
        with suppress(UsageError):  # weights that the kernels cannot take
            fused = other(setup.model_copy(update={field: kernels}))
            yield Assumption(
                f"{field}_alternative",
                f"with {library}'s kernels {format_bytes(fused.peak.allocated_bytes)} would be allocated "
                f"(--{field.replace('_', '-')} {kernels})",
            )
