"""What a page shows of one setup: its report, its step over time, and the tensors alive at the peak."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from memcalc.common.assumption import Assumption
from memcalc.errors import MemcalcError
from memcalc.report.schema import Report
from memcalc.report.timeline import Timeline
from memcalc.setup.setup import InferenceSetup, TrainingSetup
from memcalc.tables.gpus import Gpu

if TYPE_CHECKING:
    from memcalc.models.spec import ModelSpec
    from memcalc.provenance.explanation import TensorEntry

SAMPLES = 600
"""Pieces of the axis of a page's picture."""

_MOST_TENSORS = 16


@dataclass(frozen=True)
class Setup:
    """One setup of a page. A job without a step that is known has no timeline and no tensors."""

    report: Report
    timeline: Timeline | None = None
    heading: str = ""
    """What it is called beside others."""
    tensors: tuple[TensorEntry, ...] = ()
    """What is alive at the peak, the largest first."""

    def with_report(self, report: Report) -> Setup:
        """The same with a report that says more."""
        drawn = None if self.timeline is None else replace(self.timeline, report=report)
        return replace(self, report=report, timeline=drawn)


def page_setup(
    spec: ModelSpec,
    setup: TrainingSetup | InferenceSetup,
    gpu: Gpu | str | None = None,
    *,
    assumptions: Sequence[Assumption] = (),
    teacher: ModelSpec | None = None,
    heading: str = "",
) -> Setup:
    """Estimate a job for a page. Parameters and errors as of `estimate`; `heading` tells it from others."""
    from memcalc.tables.gpus import find_gpu
    from memcalc.timeline import timeline

    found = find_gpu(gpu) if isinstance(gpu, str) else gpu
    drawn = timeline(spec, setup, found, assumptions=assumptions, teacher=teacher, samples=SAMPLES)
    return Setup(drawn.report, drawn, heading, _tensors(spec, setup, found, teacher, drawn.report))


def _tensors(
    spec: ModelSpec, setup: TrainingSetup | InferenceSetup, gpu: Gpu | None, teacher: ModelSpec | None, report: Report
) -> tuple[TensorEntry, ...]:
    """The largest tensors at the peak, where they are known one by one."""
    from memcalc.provenance.explain import explain

    with suppress(MemcalcError):  # a job that cannot be explained is shown by the parts of its rows
        found = explain(spec, setup, gpu, teacher=teacher)
        if found.total_bytes == report.peak.process_bytes:  # the same rank of several
            return found.tensors[:_MOST_TENSORS]
    return ()
