"""`memcalc sweep`: one model under many setups."""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from html import escape
from textwrap import fill
from typing import TYPE_CHECKING, Annotated, Any

import typer

from memcalc.cli.job import Request
from memcalc.cli.job_command import with_job
from memcalc.cli.model_options import MODEL, ModelOptions
from memcalc.cli.options import declared
from memcalc.cli.progress import watched
from memcalc.cli.read_model import ReadModel, read_model
from memcalc.cli.shown import Shown
from memcalc.decide.axes import Axis, combinations, read_axis
from memcalc.errors import MemcalcError, UsageError, option_name
from memcalc.units import Unit, format_bytes

if TYPE_CHECKING:
    from memcalc.render.heat_map import Grid

_SIMULATED = ("lengths", "alloc_conf")
"""Fields that ask for a simulation of PyTorch's allocator."""
_MOST_SIMULATED = 200
"""Setups of a sweep that are simulated at most."""


@with_job(without=("check", "svg", "snapshot"), groups=(MODEL,))
def command(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="A path, a model of the Hub (ORG/NAME), or a count such as 8B.", show_default=False
        ),
    ],
    *,
    options: ModelOptions,
    request: Request,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print comma-separated values.", rich_help_panel="Output")] = (
        False
    ),
) -> None:
    """Estimate every combination of options that have several values: 1..64, 1..64*2 (doubling) or 1024,2048.

    The allocator is simulated where --lengths or --alloc-conf asks for it, for 200 setups at most; else its reserve is
    --allocator-reserve, 2 % unless given.

    Two options make a heat map, any other number a table; --csv and --json (an object a line) are for programs.
    """
    shown = request.shown(as_csv=as_csv)
    shown.only("sweep", "json", "markdown", "csv", "html")
    shown.check_width()
    if request.chosen["check"]:
        raise UsageError("--check is for one job, and a sweep has many; leave it out.")
    axes = [
        read_axis(name, option_name(name), text)
        for name, text in request.given.items()
        if isinstance(text, str) and _may_vary(name) and ("," in text or ".." in text)
    ]
    if not axes:
        raise UsageError("sweep needs an option with several values, such as --batch 1..16 or --seq-len 1024,2048.")
    rows = _rows(read_model(model, options), request, axes)
    shown.answer(_texts(model, axes, rows, shown), (), None, page=lambda: _page(model, axes, rows, shown))


def _may_vary(name: str) -> bool:
    """Whether commas in an option's value stand between values; in some they stand between modules of one."""
    return declared()[name].kind is not str or name == "optimizer"


def _rows(model: ReadModel, request: Request, axes: Sequence[Axis]) -> list[dict[str, Any]]:
    from memcalc.decide.side_by_side import each
    from memcalc.training.step import UNTRACED_OPTIONS

    setups = list(combinations(axes))
    asked = [option_name(name) for name in _SIMULATED if request.given.get(name) is not None]
    if asked and len(setups) > _MOST_SIMULATED:
        raise UsageError(
            f"{asked[0]} has PyTorch's allocator simulated for every setup, of which these are {len(setups):,}; take "
            f"{_MOST_SIMULATED} at most, or leave it out."
        )
    traced = [axis.name for axis in axes if axis.name not in UNTRACED_OPTIONS]
    order = sorted(range(len(setups)), key=lambda at: [setups[at][name] for name in traced])  # one trace after another
    answered = each(partial(_row, model, request), [setups[at] for at in order])
    rows = dict(zip(order, watched(answered, len(setups), "setups"), strict=True))
    return [rows[at] for at in range(len(setups))]


def _row(model: ReadModel, request: Request, values: Mapping[str, str]) -> dict[str, Any]:
    """One setup: the values of its options, and its answer or what is wrong with it."""
    from memcalc.estimation.estimate import estimate

    job = Request(request.mode, {**request.given, **values}, request.chosen).read()
    row: dict[str, Any] = {name: declared()[name].read(value) for name, value in values.items()}
    try:
        found = model.described(job.setup)
        simulate = any(request.given.get(name) is not None for name in _SIMULATED)
        report = estimate(found.spec, found.setup, job.gpu, assumptions=found.assumptions, simulate=simulate)
    except MemcalcError as problem:
        nothing = ("process_bytes", "allocated_bytes", "peak", "fits", "free_bytes", "assumption")
        return {**row, **dict.fromkeys(nothing), "error": str(problem)}
    return {
        **row,
        "process_bytes": report.peak.process_bytes,
        "allocated_bytes": report.peak.allocated_bytes,
        "peak": report.peak.moment,
        "fits": None if report.gpu is None else report.gpu.fits,
        "free_bytes": None if report.gpu is None else report.gpu.free_bytes,
        "assumption": _reserve(job.setup.allocator_reserve, report.setup["allocator_reserve"]),
        "error": None,
    }


def _reserve(given: float | None, used: Any) -> str | None:
    """What is assumed of the allocator's reserve; None where it was given, or an engine has no such allocator."""
    if given is not None or not used:
        return None
    return (
        f"allocator reserve {used:.0%}, not simulated in a sweep (--allocator-reserve): `memcalc estimate --gpu` "
        "simulates it where it can, and its verdict counts"
    )


def _notes(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What the rows assume, each once."""
    return list(dict.fromkeys(row["assumption"] for row in rows if row["assumption"]))


def _texts(
    model: str, axes: Sequence[Axis], rows: Sequence[Mapping[str, Any]], shown: Shown
) -> dict[str, Callable[[], str]]:
    """The answer in each format."""

    def text() -> str:
        from memcalc.render import heat_map, styles, tables

        below = "".join(fill(note, shown.columns) + "\n" for note in _notes(rows))
        if len(axes) != 2:
            return tables.text(*_table(axes, rows, shown.unit), shown.unicode, shown.columns) + below
        lines = heat_map.render(_grid(axes, rows), shown.columns, shown.unit, shown.unicode)
        return (styles.coloured(lines) if shown.coloured else styles.plain(lines)) + below

    def csv() -> str:
        from memcalc.render import tables

        return tables.csv(rows)

    def markdown() -> str:
        from memcalc.render import tables
        from memcalc.render.areas import shown_name
        from memcalc.render.markdown import quoted

        below = "".join(f"\n{note}\n" for note in _notes(rows))
        return f"**{quoted(shown_name(model))}**\n\n" + tables.markdown(*_table(axes, rows, shown.unit)) + below

    return {
        "text": text,
        "csv": csv,
        "markdown": markdown,
        "json": lambda: "".join(json.dumps(row) + "\n" for row in rows),
    }


def _page(model: str, axes: Sequence[Axis], rows: Sequence[Mapping[str, Any]], shown: Shown) -> str:
    from memcalc.cli.files import command_line
    from memcalc.render import heat_map, html, tables
    from memcalc.render.areas import shown_name

    title = f"{shown_name(model)}: {' and '.join(option_name(axis.name) for axis in axes)}"
    table = (
        heat_map.html(_grid(axes, rows), shown.unit)
        if len(axes) == 2
        else tables.html(*_table(axes, rows, shown.unit)[:2])
    )
    below = "".join(f"<p>{escape(note)}</p>" for note in _notes(rows))
    return html.table_page(title, table + below, command_line())


def _grid(axes: Sequence[Axis], rows: Sequence[Mapping[str, Any]]) -> "Grid":
    from memcalc.render.heat_map import Cell, Grid

    down, across = axes
    width = len(across.values)
    cells = [Cell(row["process_bytes"], row["free_bytes"]) for row in rows]
    lines = [cells[start : start + width] for start in range(0, len(cells), width)]
    return Grid(option_name(down.name), option_name(across.name), down.values, across.values, lines)


def _table(
    axes: Sequence[Axis], rows: Sequence[Mapping[str, Any]], unit: Unit
) -> tuple[tuple[str, ...], list[tuple[str, ...]], range]:
    """Heads, rows, and which columns are aligned to the right."""
    heads = (*(option_name(axis.name) for axis in axes), "process", "peak")
    lines = [
        (*(str(row[axis.name]) for axis in axes), _size(row, unit), row["peak"] or str(row["error"])) for row in rows
    ]
    return heads, lines, range(len(axes) + 1)


def _size(row: Mapping[str, Any], unit: Unit) -> str:
    if row["process_bytes"] is None:
        return "-"
    mark = "" if row["fits"] is None else " ok" if row["fits"] else " no"
    return format_bytes(row["process_bytes"], unit) + mark
