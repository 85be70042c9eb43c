"""`memcalc compare`: models, or ways to train one, side by side."""

import json
from typing import Annotated, Any

import typer

from memcalc.cli import output
from memcalc.cli.estimate_options import Request, with_job
from memcalc.cli.read_model import read_model
from memcalc.errors import UsageError
from memcalc.report.schema import Report
from memcalc.units import Unit, format_bytes, format_count


@with_job
def command(
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL...", help="Paths, models of the Hub (ORG/NAME), or counts such as 8B.", show_default=False
        ),
    ],
    *,
    request: Request,
    methods: Annotated[
        str | None,
        typer.Option(
            "--methods",
            metavar="NAMES",
            show_default=False,
            help="Ways to train, with commas: full, lora, dora, qlora, galore, lomo, head.",
        ),
    ] = None,
) -> None:
    """Estimate several models, or several ways to train them, under the same options, row by row.

    Below the sizes stands what each column has more or less than the first.
    """
    if request.chosen["markdown"] or request.chosen["check"]:
        raise UsageError("compare answers with a table or with --json; leave out --markdown and --check.")
    columns = [(model, method) for model in models for method in _methods(methods)]
    if len(columns) < 2:
        raise UsageError("compare needs two columns: give two models, or --methods full,lora,qlora.")
    reports = dict(_column(request, *column) for column in columns)
    if request.json:
        output.write(json.dumps([{"column": name, **report.model_dump()} for name, report in reports.items()]) + "\n")
    else:
        _print(reports, request.read_unit())


def _methods(text: str | None) -> list[str | None]:
    from memcalc.decide.methods import METHODS
    from memcalc.setup.sentences import choice_sentence

    if text is None:
        return [None]
    names: list[str | None] = []
    for name in text.split(","):
        if name.strip() not in METHODS:
            raise UsageError(choice_sentence("--methods", name.strip(), METHODS))
        names.append(name.strip())
    return names


def _column(request: Request, model: str, method: str | None) -> tuple[str, Report]:
    """The heading of a column, and its report. What the user gave comes before what the method stands for."""
    from memcalc.decide.methods import METHODS
    from memcalc.estimation import estimate

    spec, assumptions = read_model(model)
    job = request.job("training", METHODS[method]) if method else request.read()
    return f"{model} {method or ''}".strip(), estimate(spec, job.setup, job.gpu, assumptions=assumptions)


def _print(reports: dict[str, Report], unit: Unit) -> None:
    first = next(iter(reports.values()))

    def line(title: str, size_of: Any) -> list[tuple[str, ...]]:
        sizes = [size_of(report) for report in reports.values()]
        changes = ["", *(_change(size - sizes[0], unit) for size in sizes[1:])]
        return [(title, *(format_bytes(size, unit) for size in sizes)), ("", *changes)]

    rows = [
        ("parameters", *(format_count(report.model.parameters.total) for report in reports.values())),
        ("trained", *(format_count(report.model.parameters.trainable) for report in reports.values())),
    ]
    for name, _ in first.components.rows():
        rows += line(name.replace("_", " "), lambda report, name=name: getattr(report.components, name).peak_bytes)
    rows += line("process", lambda report: report.peak.process_bytes)
    rows.append(("peak", *(report.peak.moment for report in reports.values())))
    if first.gpu is not None:
        fits = ("does not fit" if report.gpu and not report.gpu.fits else "fits" for report in reports.values())
        rows.append((first.gpu.name, *fits))
    shown = [row for row in rows if any(row)]
    columns = [output.Column("", whole=True), *(output.Column(name, right=True) for name in reports)]
    output.print_table(columns, shown)


def _change(nbytes: int, unit: Unit) -> str:
    return "" if not nbytes else f"{'+' if nbytes > 0 else '-'}{format_bytes(abs(nbytes), unit)}"
