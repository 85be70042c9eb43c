"""What `estimate`, `from-file` and `from-hub` share: setup, GPU and output options, and the answer."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from inspect import Parameter, signature
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from memcalc.cli.options import SETUPS, build_setup, declared, read_value
from memcalc.cli.shown import Shown, read_shown, report_texts
from memcalc.common.assumption import Assumption
from memcalc.errors import UsageError
from memcalc.report.schema import Report
from memcalc.setup.setup import InferenceSetup, TrainingSetup

if TYPE_CHECKING:
    from memcalc.decide.remedies import Remedy
    from memcalc.decide.what_fits import Advice
    from memcalc.models.spec import ModelSpec
    from memcalc.render.page_setup import Setup
    from memcalc.tables.gpus import Gpu

_BOTH = "width"
"""The option that is the picture's width for a denoiser, and the box's for all other models."""

DOES_NOT_FIT = 3
"""Exit code of --check."""


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
            from memcalc.cli.teacher import read_teacher

            teacher = read_teacher(self.teacher)
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
        from memcalc.estimation import estimate

        self.shown.only("an estimate", "json", "markdown", "html", "svg")
        drawn = self.page_setup(spec, assumptions, teacher) if self.shown.pictured else None
        if drawn is None:
            report = estimate(spec, self.setup, self.gpu, assumptions=assumptions, teacher=teacher)
        else:
            report = drawn.report
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

    @property
    def json(self) -> bool:
        """Whether --json was given."""
        return bool(self.chosen["json"])

    def shown(self, *, as_csv: bool = False) -> Shown:
        """How the answer is shown. Raises UsageError."""
        of_job = ("gpu", "check", "teacher")
        given = {name: value for name, value in self.chosen.items() if name not in of_job}
        return read_shown(as_csv=as_csv, **given)

    def read(self) -> Job:
        """The job of these options. Raises UsageError."""
        return _job(read_value("--mode", Literal["training", "inference"], self.mode), self.given, **self.chosen)

    def job(self, mode: str, below: Mapping[str, Any]) -> Job:
        """The job of these options, and of those `below` (by field name) where none was given. Raises UsageError."""
        if read_value("--mode", Literal["training", "inference"], self.mode) not in ("training", mode):
            raise UsageError(f"--mode {self.mode} does not fit what was read, which is {mode}: leave it out.")
        values = {name: value if isinstance(value, bool) else str(value) for name, value in below.items()}
        values.update((name, value) for name, value in self.given.items() if value is not None)
        return _job(mode, values, **self.chosen)


def with_job(function: Callable[..., None], without: Sequence[str] = ()) -> Callable[..., None]:
    """Give a command the setup, GPU and output options: it gets them as its keyword argument `job`.

    A command with a `request` in its place gets them unread: it knows the mode and more options itself. Its help does
    not list the options that it is `without`: it refuses them in a sentence.
    """
    asked = signature(function).parameters
    own = [parameter for parameter in asked.values() if parameter.name not in ("job", "request")]
    setup_options = [option.parameter() for option in declared().values() if option.name != _BOTH]
    shared = [*_job_options(), *_output_options()]
    for parameter in shared:
        if parameter.name in without:
            (info,) = parameter.annotation.__metadata__
            info.hidden = True

    def command(**values: Any) -> None:
        mode = values.pop("mode")
        given = {parameter.name: values.pop(parameter.name) for parameter in setup_options}
        chosen = {parameter.name: values.pop(parameter.name) for parameter in shared if parameter.name in values}
        if "request" in asked:
            function(request=Request(mode, given, chosen), **values)
        else:
            function(job=Request(mode, given, chosen).read(), **values)

    first = ("mode", "gpu", "check")  # what everyone wants
    parameters = sorted(shared, key=lambda parameter: parameter.name not in first)
    parameters = [*own, *parameters[: len(first)], *setup_options, *parameters[len(first) :]]
    command.__signature__ = signature(function).replace(parameters=parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    command.__doc__ = function.__doc__
    return command


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


def _complete_gpu(incomplete: str) -> list[str]:
    from memcalc.tables.gpus import GPUS

    return [gpu.name for gpu in GPUS if gpu.name.startswith(incomplete)]


def _complete_mode(incomplete: str) -> list[str]:
    return [mode for mode in SETUPS if mode.startswith(incomplete)]


def _complete_unit(incomplete: str) -> list[str]:
    return [unit for unit in ("GiB", "GB") if unit.startswith(incomplete)]


def _job_options() -> list[Parameter]:
    return [
        _option("mode", str, "training", "What the model is used for.", "Mode", "training|inference", _complete_mode),
        _option(
            "gpu",
            str | None,
            None,
            "GPU to fit: a name of `memcalc gpus`, or a size such as 24GB.",
            "GPU",
            "NAME|SIZE",
            _complete_gpu,
        ),
        _option(
            "teacher",
            str | None,
            None,
            "Teacher of --objective distillation and gkd: a path, a model of the Hub, or a size.",
            "Objective",
            "PATH|ORG/NAME|SIZE",
        ),
        _option("check", bool, False, "Exit with code 3 when the job does not fit the --gpu.", "GPU"),
    ]


def _output_options() -> list[Parameter]:
    heading = "Output"
    return [
        _option("json", bool, False, "Print one JSON object; `memcalc schema` describes it.", heading),
        _option("markdown", bool, False, "Print a Markdown table.", heading),
        _option("html", str | None, None, "Also write a page with pictures to this file.", heading, "FILE"),
        _option("svg", str | None, None, "Also write the step over time, as a picture, to this file.", heading, "FILE"),
        _option(
            "snapshot",
            str | None,
            None,
            "Also write the step as PyTorch's memory snapshot, for its memory viewer; `compare` reads a real one.",
            heading,
            "FILE",
        ),
        _option(
            "output",
            str | None,
            None,
            "Write the answer to this file, whole or not at all, and print nothing; without an option that chooses, "
            ".json, .md, .html and .svg choose the format.",
            heading,
            "FILE",
        ),
        _option("unit", str, "GiB", "Unit of sizes.", heading, "GiB|GB", _complete_unit),
        _option("ascii", bool, False, "Draw with ASCII characters only.", heading),
        _option(
            "width",
            str | None,
            None,
            "Width of the box in columns; for a denoiser, of the picture in pixels.",
            heading,
            "N",
            unset="the terminal's",
        ),
        _option("color", bool | None, None, "Colours.", heading, unset="on a terminal without NO_COLOR"),
    ]


def _option(  # noqa: PLR0913 (what typer.Option takes)
    name: str,
    kind: Any,
    default: Any,
    text: str,
    heading: str,
    metavar: str | None = None,
    complete: Any = None,
    unset: str = "",
) -> Parameter:
    both = f"--{name}/--no-{name}" if kind == bool | None else f"--{name}"
    shown = unset if default is None or isinstance(default, bool) else str(default)
    info = typer.Option(
        both, help=text, show_default=shown or False, metavar=metavar, rich_help_panel=heading, autocompletion=complete
    )
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, info])
