"""Reports as the library's users meet them: they print, and are shown as Markdown, as a page and as a picture."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from pydantic import PrivateAttr

from memcalc.common.arguments import check_choice, check_type
from memcalc.common.assumption import Assumption
from memcalc.errors import UsageError
from memcalc.models import spec as models
from memcalc.report import schema
from memcalc.setup.setup import InferenceSetup, TrainingSetup
from memcalc.tables.gpus import Gpu
from memcalc.units import Unit

if TYPE_CHECKING:
    from memcalc.render.page_setup import Setup
    from memcalc.report.gpu_schema import GpuFit, Serving
    from memcalc.report.schema import InferencePhases, TrainingPhases
    from memcalc.report.timeline import Timeline


@dataclass(frozen=True)
class Job:
    """What a report answers for, to draw it when that is asked for."""

    spec: models.ModelSpec
    setup: TrainingSetup | InferenceSetup
    gpu: Gpu | str | None
    assumptions: Sequence[Assumption]
    teacher: models.ModelSpec | None


class Report(schema.Report):
    """The memory of one job on its most loaded GPU; `print` shows the box. All sizes are integer bytes."""

    _job: Job | None = PrivateAttr(default=None)

    def render(self, *, width: int = 80, unit: Unit = "GiB", unicode: bool = True, color: bool = False) -> str:
        """The box as text.

        Args:
            width: columns; the box has 60 at least.
            unit: GiB or GB.
            unicode: draw with more than ASCII.
            color: with the escape codes of a terminal.

        Raises:
            UsageError: an argument is none of these.
        """
        from memcalc.render import box, styles

        check_type("width", width, int, "a number of columns")
        check_choice("unit", unit, ("GiB", "GB"))
        lines = box.render(self, width, unit, unicode=unicode)
        return styles.coloured(lines) if color else styles.plain(lines)

    def to_markdown(self, *, unit: Unit = "GiB") -> str:
        """The report as a Markdown table, to paste into an issue. Raises UsageError where `unit` is none."""
        from memcalc.render import markdown

        check_choice("unit", unit, ("GiB", "GB"))
        return markdown.render(self, unit)

    def with_needed_bytes(self) -> Self:
        """This report with `gpu.needed_bytes`, the smallest memory on which the job runs.

        The job is simulated some five times more for that. Null remains where the allocator is not simulated, and
        where no GPU was named. Raises UsageError where the report is not one that `estimate` gave.
        """
        from memcalc.estimation.process import needed_bytes
        from memcalc.tables.gpus import find_gpu

        job = self._known_job()
        if self.gpu is None or job.gpu is None:
            return self
        gpu = find_gpu(job.gpu) if isinstance(job.gpu, str) else job.gpu
        least = needed_bytes(job.spec, job.setup, gpu, job.teacher)
        return self.model_copy(update={"gpu": self.gpu.model_copy(update={"needed_bytes": least})})

    def timeline(self, *, samples: int = 400) -> "Timeline":
        """The memory of the step over time: of each of `samples` equal pieces the fullest moment.

        Raises:
            UsageError: `samples` is no number from 1 on, or the report is not one that `estimate` gave, or one of a
                pipeline.
        """
        from memcalc.timeline import timeline

        check_type("samples", samples, int, "a number of pieces")
        if samples < 1:
            raise UsageError(f"samples must be 1 or more, not {samples}.")
        job = self._known_job()
        return timeline(job.spec, job.setup, job.gpu, assumptions=job.assumptions, teacher=job.teacher, samples=samples)

    def to_html(self, *, unit: Unit = "GiB") -> str:
        """A page with the step over time, the rows, the tensors at the peak and the assumptions: one file, no script.

        A report that was read back from JSON has no picture. Raises UsageError where `unit` is none.
        """
        from memcalc.render import html

        check_choice("unit", unit, ("GiB", "GB"))
        return html.page([self._page_setup()], unit)

    def to_svg(self, *, unit: Unit = "GiB") -> str:
        """The step over time as an SVG picture. Raises UsageError as `timeline`, and where `unit` is none."""
        from memcalc.render import svg

        check_choice("unit", unit, ("GiB", "GB"))
        return svg.render(self.timeline(samples=600), unit)

    def _repr_html_(self) -> str:
        """How a notebook shows it."""
        from memcalc.render import html

        return html.fragment([self._page_setup()])

    def _known_job(self) -> "Job":
        if self._job is None:
            raise UsageError("only a report that estimate() gave knows its job; estimate again for a picture.")
        return self._job

    def _page_setup(self) -> "Setup":
        from memcalc.render.page_setup import Setup, page_setup

        job = self._job
        if job is None:
            return Setup(self)
        drawn = page_setup(job.spec, job.setup, job.gpu, assumptions=job.assumptions, teacher=job.teacher)
        return drawn.with_report(self)

    def __eq__(self, other: object) -> bool:
        """Two reports are equal where they say the same, whether or not they can be drawn."""
        return type(self) is type(other) and dict(self) == dict(other)

    __hash__ = None  # type: ignore[assignment]  # a setup is a dict

    def __str__(self) -> str:
        return self.render().rstrip("\n")


class TrainingReport(Report):
    """The report of one optimizer step."""

    if TYPE_CHECKING:  # narrower types for type checkers; the contract is that of every report
        phases: TrainingPhases
        saved_for_backward_bytes: int


class TrainingReportOnGpu(TrainingReport):
    """The report of one optimizer step, with the GPU that was asked about."""

    if TYPE_CHECKING:
        gpu: GpuFit


class InferenceReport(Report):
    """The report of prefill and decoding."""

    if TYPE_CHECKING:
        phases: InferencePhases
        kv_cache_bytes: int


class InferenceReportOnGpu(InferenceReport):
    """The report of prefill and decoding, with the GPU that was asked about and what it serves."""

    if TYPE_CHECKING:
        gpu: GpuFit
        serving: Serving
