"""What the commands that estimate share: the job that the options say, and the answer to it."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import typer

from memcalc.cli.options import build_setup, read_value
from memcalc.cli.shown import Shown, read_shown, report_texts
from memcalc.common.assumption import Assumption
from memcalc.errors import UsageError, option_name
from memcalc.report.schema import Report
from memcalc.setup.setup import InferenceSetup, TrainingSetup

if TYPE_CHECKING:
    from memcalc.decide.remedies import Remedy
    from memcalc.decide.what_fits import Advice
    from memcalc.models.spec import ModelSpec
    from memcalc.render.page_setup import Setup
    from memcalc.tables.gpus import Gpu

DOES_NOT_FIT = 3
"""Exit code of --check."""

_NOT_SEARCHED = (
    "What makes it smaller is not searched for with --lengths, as every remedy would be a run of many steps; with "
    "--seq-len\nand the longest length in its place it is.\n"
)


@dataclass(frozen=True)
class Job:
    """A checked setup, the GPU that was asked about, and how to show the answer."""

    setup: TrainingSetup | InferenceSetup
    gpu: "Gpu | None"
    check: bool
    shown: Shown
    teacher: str | None = None
    known_remedies: "Callable[[TrainingSetup], Sequence[Remedy] | None] | None" = None
    """What would make a setup smaller, where not all that memcalc knows is at hand."""

    def answer(self, spec: "ModelSpec", assumptions: Iterable[Assumption] = ()) -> None:
        """Answer for a model: what is said of it is in `respond`."""
        from memcalc.models.registry import denoisers

        if spec.model_type in denoisers() and self.shown.width is not None:
            setup = type(self.setup)(**self.setup.model_dump(exclude_unset=True), width=self.shown.width)
            replace(self, setup=setup, shown=replace(self.shown, width=None)).answer(spec, assumptions)
            return
        self.shown.check_width()
        teacher = None
        if self.teacher is not None:
            from memcalc.cli.read_model import read_model

            teacher = read_model(self.teacher, what="--teacher").spec()
        job, lines = self._calibrated()
        job._respond(spec, (*assumptions, *lines), teacher)

    def _calibrated(self) -> "tuple[Job, list[Assumption]]":
        """The job with what was measured on this machine, where it is for this machine's GPU, and what to say of it."""
        if self.gpu is None:
            return self, []
        from memcalc.cli.calibrated import calibrated

        setup, lines = calibrated(self.setup, self.gpu)
        return replace(self, setup=setup), lines

    def _respond(self, spec: "ModelSpec", assumptions: tuple[Assumption, ...], teacher: "ModelSpec | None") -> None:
        if self.shown.snapshot is not None:
            self._write_snapshot(self.shown.snapshot, spec, teacher)
            replace(self, shown=replace(self.shown, snapshot=None)).respond(spec, assumptions, teacher)
            return
        self.respond(spec, assumptions, teacher)

    def _write_snapshot(self, path: str, spec: "ModelSpec", teacher: "ModelSpec | None") -> None:
        import pickle

        from memcalc.cli.files import write_whole
        from memcalc.provenance.snapshot import snapshot

        write_whole(path, pickle.dumps(snapshot(spec, self.setup, self.gpu, teacher), protocol=4))

    def respond(self, spec: "ModelSpec", assumptions: tuple[Assumption, ...], teacher: "ModelSpec | None") -> None:
        """Estimate and print the report."""
        from memcalc.estimation.estimate import estimate
        from memcalc.estimation.process import with_needed_bytes

        self.shown.only("an estimate", "json", "markdown", "html", "svg")
        drawn = self.page_setup(spec, assumptions, teacher) if self.shown.pictured else None
        if drawn is None:
            report = estimate(spec, self.setup, self.gpu, assumptions=assumptions, teacher=teacher)
            if self.gpu is not None:
                quickly = not self.shown.json  # which pays for what takes more time
                report = with_needed_bytes(report, spec, self.setup, self.gpu, teacher, quickly=quickly)
        else:
            report = drawn.report
        if report.mixed_lengths is not None and report.gpu is not None and not report.gpu.fits:
            self.show(report, _NOT_SEARCHED, drawn)
            return
        advice = None if report.gpu is None or report.gpu.fits else self._advice(spec, teacher)
        if advice is None or self.gpu is None:
            self.show(report, drawn=drawn)
            return
        from memcalc.render.advice import render

        report = report.model_copy(update={"remedies": advice.reported()})
        self.show(report, render(advice, self.gpu, self.shown.unit), drawn)

    def page_setup(
        self, spec: "ModelSpec", assumptions: tuple[Assumption, ...], teacher: "ModelSpec | None"
    ) -> "Setup":
        """What a page shows of the job."""
        from memcalc.render.page_setup import page_setup

        return page_setup(spec, self.setup, self.gpu, assumptions=assumptions, teacher=teacher)

    def _advice(self, spec: "ModelSpec", teacher: "ModelSpec | None") -> "Advice | None":
        """What would make a training job fit."""
        if not isinstance(self.setup, TrainingSetup) or self.gpu is None:
            return None
        from memcalc.decide.what_fits import advise

        known = None if self.known_remedies is None else self.known_remedies(self.setup)
        return advise(spec, self.setup, self.gpu, teacher=teacher, known=known)

    def show(self, report: Report, below: str = "", drawn: "Setup | None" = None) -> None:
        """Print `report` and what stands `below` it, and check it."""
        self.shown.only("a report", "json", "markdown", "html", "svg")
        self.shown.check_width()
        texts = report_texts(report, self.shown, below)
        if self.shown.pictured:
            from memcalc.render.page_setup import Setup

            page = Setup(report) if drawn is None else drawn.with_report(report)
            self.shown.answer(texts, [page], page.timeline)
        else:
            self.shown.write(texts[self.shown.format]())
        self.check_fit(report)

    def check_fit(self, report: Report) -> None:
        """Exit with 3 when the report was to be checked and does not fit."""
        if self.check and report.gpu is not None and not report.gpu.fits:
            raise typer.Exit(DOES_NOT_FIT)


@dataclass(frozen=True)
class Request:
    """The options as they were given, for a command that has options from elsewhere too."""

    mode: str
    given: dict[str, Any]
    chosen: dict[str, Any]
    kind: Callable[..., Job] = Job
    """What makes the job: of a kind of its own where the answer is another than the box."""

    @property
    def json(self) -> bool:
        """Whether --json was given."""
        return bool(self.chosen["json"])

    def refuse(self, fields: Sequence[str], why: str) -> None:
        """Raise UsageError where one of `fields` was given, which a command cannot use; `why` follows its option."""
        for name in fields:
            if self.given.get(name) is not None:
                raise UsageError(f"{option_name(name)} {why}")

    def shown(self, *, as_csv: bool = False) -> Shown:
        """How the answer is shown. Raises UsageError."""
        of_job = ("gpu", "check", "teacher")
        given = {name: value for name, value in self.chosen.items() if name not in of_job}
        return read_shown(as_csv=as_csv, **given)

    def read(self) -> Job:
        """The job of these options. Raises UsageError."""
        mode = read_value("--mode", Literal["training", "inference"], self.mode)
        return self.kind(**vars(_job(mode, self.given, **self.chosen)))

    def job(self, mode: str, below: Mapping[str, Any]) -> Job:
        """The job of these options, and of those `below` (by field name) where none was given. Raises UsageError."""
        if read_value("--mode", Literal["training", "inference"], self.mode) not in ("training", mode):
            raise UsageError(f"--mode {self.mode} does not fit what was read, which is {mode}: leave it out.")
        values = {name: value if isinstance(value, bool) else str(value) for name, value in below.items()}
        values.update((name, value) for name, value in self.given.items() if value is not None)
        return self.kind(**vars(_job(mode, values, **self.chosen)))


def _job(mode: str, given: dict[str, Any], *, gpu: str | None, check: bool, teacher: str | None, **shown: Any) -> Job:
    if check and gpu is None:
        raise UsageError("--check needs to know the GPU: add --gpu, such as --gpu H100-80GB or --gpu 24GB.")
    found = None
    if gpu is not None:
        from memcalc.tables.gpus import find_gpu

        found = find_gpu(gpu)
    if given.get("lengths") is not None:
        from memcalc.cli.lengths_file import read_lengths

        given = {**given, "lengths": read_lengths(given["lengths"])}
    return Job(build_setup(mode, given), found, check, read_shown(**shown), teacher)
