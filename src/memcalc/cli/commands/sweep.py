"""`memcalc sweep`: one model under many setups."""

import csv
import io
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from memcalc.cli import output
from memcalc.cli.estimate_options import Request, with_job
from memcalc.cli.options import declared
from memcalc.cli.read_model import read_model
from memcalc.decide.axes import Axis, combinations, read_axis
from memcalc.errors import MemcalcError, UsageError, option_name
from memcalc.units import Unit, format_bytes

_PROGRESS_EVERY = 100
"""Setups after which the progress is said again, where stderr is a terminal."""


@with_job
def command(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="A path, a model of the Hub (ORG/NAME), or a count such as 8B.", show_default=False
        ),
    ],
    *,
    request: Request,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print comma-separated values.", rich_help_panel="Output")] = (
        False
    ),
) -> None:
    """Estimate every combination of options that have several values: 1..64, 1..64*2 (doubling) or 1024,2048.

    Two options make a grid of sizes, any other number a table; --csv and --json (an object a line) are for programs.
    """
    if request.chosen["markdown"] or request.chosen["check"] or (as_csv and request.json):
        raise UsageError(
            "sweep answers with a table, --csv or --json: give one of them, without --markdown or --check."
        )
    axes = [
        read_axis(name, option_name(name), text)
        for name, text in request.given.items()
        if isinstance(text, str) and declared()[name].kind is not str and ("," in text or ".." in text)
    ]
    if not axes:
        raise UsageError("sweep needs an option with several values, such as --batch 1..16 or --seq-len 1024,2048.")
    spec, assumptions = read_model(model)
    rows = _rows(spec, assumptions, request, axes)
    unit = request.read_unit()
    if request.json:
        output.write("".join(json.dumps(row) + "\n" for row in rows))
    elif as_csv:
        output.write(_csv(rows))
    elif len(axes) == 2:
        _grid(axes, rows, unit)
    else:
        _table(axes, rows, unit)


def _rows(spec: Any, assumptions: Any, request: Request, axes: Sequence[Axis]) -> list[dict[str, Any]]:
    from memcalc.estimation import estimate

    rows, told = [], sys.stderr is not None and sys.stderr.isatty()
    setups = list(combinations(axes))
    for index, values in enumerate(setups):
        if told and index % _PROGRESS_EVERY == 0 and len(setups) > _PROGRESS_EVERY:
            sys.stderr.write(f"\r{index:,} of {len(setups):,}")
        job = Request(request.mode, {**request.given, **values}, request.chosen).read()
        row: dict[str, Any] = {axis.name: declared()[axis.name].read(values[axis.name]) for axis in axes}
        try:
            report = estimate(spec, job.setup, job.gpu, assumptions=assumptions)
        except MemcalcError as problem:
            row |= {"process_bytes": None, "allocated_bytes": None, "peak": None, "fits": None, "error": str(problem)}
        else:
            row |= {
                "process_bytes": report.peak.process_bytes,
                "allocated_bytes": report.peak.allocated_bytes,
                "peak": report.peak.moment,
                "fits": None if report.gpu is None else report.gpu.fits,
                "error": None,
            }
        rows.append(row)
    if told and len(setups) > _PROGRESS_EVERY:
        sys.stderr.write("\r" + " " * 40 + "\r")
    return rows


def _csv(rows: Sequence[Mapping[str, Any]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _size(row: Mapping[str, Any], unit: Unit) -> str:
    if row["process_bytes"] is None:
        return "-"
    mark = "" if row["fits"] is None else " ok" if row["fits"] else " no"
    return format_bytes(row["process_bytes"], unit) + mark


def _grid(axes: Sequence[Axis], rows: Sequence[Mapping[str, Any]], unit: Unit) -> None:
    down, across = axes
    width = len(across.values)
    lines = [
        (value, *(_size(row, unit) for row in rows[index * width : (index + 1) * width]))
        for index, value in enumerate(down.values)
    ]
    corner = output.Column(f"{option_name(down.name)} \\ {option_name(across.name)}")
    output.print_table([corner, *(output.Column(value, right=True) for value in across.values)], lines)


def _table(axes: Sequence[Axis], rows: Sequence[Mapping[str, Any]], unit: Unit) -> None:
    lines = [
        (*(str(row[axis.name]) for axis in axes), _size(row, unit), row["peak"] or str(row["error"])) for row in rows
    ]
    numbers = [output.Column(head, right=True) for head in (*(option_name(axis.name) for axis in axes), "process")]
    output.print_table([*numbers, output.Column("peak")], lines)
