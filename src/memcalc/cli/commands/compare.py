"""`memcalc compare`: models, or ways to train one, side by side."""

import json
from typing import Annotated, Any

import typer

from memcalc.cli.job import Request
from memcalc.cli.job_command import with_job
from memcalc.cli.model_options import MODEL, ModelOptions
from memcalc.cli.read_model import ReadModel, read_model
from memcalc.errors import UsageError
from memcalc.render import tables
from memcalc.render.page_setup import Setup, page_setup
from memcalc.report.schema import Report
from memcalc.units import Unit, format_bytes, format_count


@with_job(without=("check", "svg"), groups=(MODEL,))
def command(
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL...", help="Paths, models of the Hub (ORG/NAME), or counts such as 8B.", show_default=False
        ),
    ],
    *,
    options: ModelOptions,
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

    Below the sizes stands what each column has more or less than the first. With --snapshot FILE a memory snapshot of
    a real run (torch.cuda.memory._dump_snapshot) is laid beside the estimate of one model, phase by phase.
    """
    shown = request.shown()
    if shown.snapshot is not None:
        if len(models) != 1 or methods is not None or request.chosen["teacher"] is not None:
            raise UsageError("--snapshot is laid beside one model: name one, and leave out --methods and --teacher.")
        _beside_snapshot(shown.snapshot, models[0], request, options)
        return
    shown.only("compare", "json", "markdown", "html")
    if request.chosen["check"]:
        raise UsageError("--check is for one job, and compare has several; leave it out.")
    columns = [(model, method) for model in models for method in _methods(methods)]
    if len(columns) < 2:
        raise UsageError("compare needs two columns: give two models, or --methods full,lora,qlora.")
    if len(set(columns)) < len(columns):
        raise UsageError("compare lays different columns side by side, and one is named twice: name each once.")
    read = {model: read_model(model, options) for model in models}
    found = [_column(request, read[model], model, method, pictured=shown.pictured) for model, method in columns]
    reports = {setup.heading: setup.report for setup in found}

    def as_json() -> str:
        return json.dumps([{"column": name, **report.model_dump()} for name, report in reports.items()]) + "\n"

    table = (("", *reports), _rows(reports, shown.unit), range(1, len(reports) + 1))
    texts = {
        "text": lambda: tables.text(*table, shown.unicode, shown.columns),
        "json": as_json,
        "markdown": lambda: tables.markdown(*table),
    }
    shown.answer(texts, found, None)


def _beside_snapshot(path: str, model: str, request: Request, options: ModelOptions) -> None:
    """Lay a real memory snapshot beside the estimate."""
    from memcalc.provenance.comparison import compare_snapshot
    from memcalc.render.snapshot_comparison import render
    from memcalc.sources.memory_snapshot import load_snapshot

    job = request.read()
    job.shown.only("compare --snapshot", "json", "snapshot")
    described = read_model(model, options).described(job.setup)
    found = compare_snapshot(described.spec, described.setup, load_snapshot(path), job.gpu)
    if job.shown.json:
        job.shown.write(json.dumps(found.model_dump(mode="json"), indent=2, ensure_ascii=False) + "\n")
    else:
        job.shown.write(render(found, job.shown.columns, job.shown.unit, unicode=job.shown.unicode))


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


def _column(request: Request, read: ReadModel, model: str, method: str | None, *, pictured: bool) -> Setup:
    """A column: its report, and its picture for a page. What was given comes before what the method stands for."""
    from memcalc.decide.methods import METHODS
    from memcalc.estimation.estimate import estimate

    job = request.job("training", METHODS[method]) if method else request.read()
    heading = f"{model} {method or ''}".strip()
    found = read.described(job.setup)
    if pictured:
        return page_setup(found.spec, found.setup, job.gpu, assumptions=found.assumptions, heading=heading)
    return Setup(estimate(found.spec, found.setup, job.gpu, assumptions=found.assumptions), None, heading)


def _rows(reports: dict[str, Report], unit: Unit) -> list[tuple[str, ...]]:
    first = next(iter(reports.values()))

    def line(title: str, size_of: Any) -> list[tuple[str, ...]]:
        sizes = [size_of(report) for report in reports.values()]
        changes = ["", *(_change(size - sizes[0], unit) for size in sizes[1:])]
        return [(title, *(format_bytes(size, unit) for size in sizes)), ("", *changes)]

    rows: list[tuple[str, ...]] = [
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
    return [row for row in rows if any(row)]


def _change(nbytes: int, unit: Unit) -> str:
    return "" if not nbytes else f"{'+' if nbytes > 0 else '-'}{format_bytes(abs(nbytes), unit)}"
