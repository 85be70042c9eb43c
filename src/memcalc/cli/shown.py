"""How an answer is shown, and where it is written: the output options of every command that estimates."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from memcalc.cli import output
from memcalc.cli.options import read_value
from memcalc.common.escaping import quoted
from memcalc.errors import UsageError
from memcalc.report.schema import Report
from memcalc.units import Unit

if TYPE_CHECKING:
    from memcalc.render.page_setup import Setup
    from memcalc.report.timeline import Timeline

NARROWEST, WIDEST = 60, 1000
"""Bounds of --width, columns."""

_SUFFIXES = {".json": "json", ".md": "markdown", ".csv": "csv", ".html": "html", ".svg": "svg"}
"""What the suffix of --output's FILE chooses where no option chooses."""

_IN_A_FILE = 80
"""Columns of what is written to a file."""


_FILES = ("output", "html", "svg", "snapshot")
"""Options that name a file."""


@dataclass(frozen=True, kw_only=True)
class Shown:
    """How the answer is to be shown: its format, what it looks like, and the files that take it or its pictures."""

    format: str
    """text, json, markdown, csv, html or svg."""
    unit: Unit
    ascii: bool
    width: int | None
    color: bool | None
    html: str | None
    svg: str | None
    snapshot: str | None
    """The file that a memory snapshot is written to; the one that is read, for `compare`."""
    output: str | None

    @property
    def json(self) -> bool:
        """Whether the answer is JSON."""
        return self.format == "json"

    @property
    def columns(self) -> int:
        """Width of the box."""
        if self.width is not None:
            return self.width
        return min(output.terminal_width(), WIDEST) if self.output is None else _IN_A_FILE

    @property
    def unicode(self) -> bool:
        """Whether every character may be used."""
        return not self.ascii and (self.output is not None or output.speaks_unicode())

    @property
    def coloured(self) -> bool:
        """Whether escape codes of colours are wanted."""
        return (self.output is None and output.wants_colour()) if self.color is None else self.color

    @property
    def pictured(self) -> bool:
        """Whether a page or a picture is asked for."""
        return self.html is not None or self.svg is not None or self.format in ("html", "svg")

    def check_width(self) -> None:
        """Raise UsageError for a box that is too narrow or too wide."""
        if self.width is not None and not NARROWEST <= self.width <= WIDEST:
            raise UsageError(f"--width must lie between {NARROWEST} and {WIDEST} columns, not {self.width}.")

    def only(self, command: str, *formats: str) -> None:
        """Raise UsageError for a format that `command` does not answer in, besides text."""
        by_option = {"html": self.html, "svg": self.svg, "snapshot": self.snapshot}
        for name in (self.format, *(name for name, path in by_option.items() if path is not None)):
            if name not in ("text", *formats):
                suffix = os.path.splitext(self.output or "")[1].lower()
                by_suffix = self.output is not None and name == self.format and by_option.get(name) is None
                out = f"give --output another suffix than {suffix}" if by_suffix else f"leave out --{name}"
                answers = ", ".join(["text", *(f"--{name}" for name in formats)])
                raise UsageError(f"{command} answers with {answers}; {out}.")

    def write(self, text: str) -> None:
        """Write the answer to stdout, or to the file of --output. Raises MemcalcError."""
        if self.output is None:
            output.write(text)
        else:
            from memcalc.cli.files import write_whole

            write_whole(self.output, text)

    def answer(
        self,
        texts: dict[str, Callable[[], str]],
        setups: Sequence["Setup"],
        picture: "Timeline | None",
        page: Callable[[], str] | None = None,
    ) -> None:
        """Write the files of --html and --svg, and the answer in its format.

        Args:
            texts: what the answer is in each format but html and svg.
            setups: what a page shows.
            page: the page, where it shows something else.
            picture: what an SVG shows. UsageError where one is asked for and there is none.
        """
        page, drawn = _once(page or (lambda: self._page(setups))), _once(lambda: self._svg(picture))
        for path, made in ((self.html, page), (self.svg, drawn)):
            if path is not None:
                from memcalc.cli.files import write_whole

                write_whole(path, made())
        self.write({**texts, "html": page, "svg": drawn}[self.format]())

    def _page(self, setups: Sequence["Setup"]) -> str:
        from memcalc.cli.files import command_line
        from memcalc.render import html

        return html.page(setups, self.unit, command_line())

    def _svg(self, picture: "Timeline | None") -> str:
        from memcalc.cli.files import command_line
        from memcalc.render import svg

        if picture is None:
            raise UsageError("an SVG is the memory of one job over time, and there is none here: leave out --svg.")
        return svg.render(picture, self.unit, command_line())


def _once(make: Callable[[], str]) -> Callable[[], str]:
    """`make`, which is called at most once."""
    made: list[str] = []

    def value() -> str:
        if not made:
            made.append(make())
        return made[0]

    return value


def report_texts(report: Report, shown: Shown, below: str = "") -> dict[str, Callable[[], str]]:
    """The report in each format; only the form at hand is imported. `below` stands under the box."""

    def text() -> str:
        from memcalc.render import box, styles

        lines = box.render(report, shown.columns, shown.unit, unicode=shown.unicode)
        return (styles.coloured(lines) if shown.coloured else styles.plain(lines)) + below

    def json() -> str:
        from memcalc.render import json_report

        return json_report.render(report)

    def markdown() -> str:
        from memcalc.render import markdown

        return markdown.render(report, shown.unit) + below

    return {"text": text, "json": json, "markdown": markdown}


def read_shown(*, unit: str, width: str | None, as_csv: bool = False, **given: Any) -> Shown:
    """The output options, read. Raises UsageError."""
    wanted = {"json": given.pop("json"), "markdown": given.pop("markdown"), "csv": as_csv}
    chosen = [name for name, asked in wanted.items() if asked]
    if len(chosen) > 1:
        raise UsageError(f"--{chosen[0]} and --{chosen[1]} exclude each other: choose one.")
    units: dict[str, Unit] = {"gib": "GiB", "gb": "GB"}
    if unit.lower() not in units:
        raise UsageError(f"--unit cannot be {quoted(unit)}: choose GiB (1024**3 bytes) or GB (1000**3 bytes).")
    path = given["output"]
    by_suffix = _SUFFIXES.get(os.path.splitext(path)[1].lower(), "text") if path is not None else "text"
    columns = None if width is None else read_value("--width", int, width)
    files = [os.path.normpath(path) for name in _FILES if (path := given.get(name)) is not None]
    if len(set(files)) < len(files):
        raise UsageError("two of --output, --html, --svg and --snapshot name the same file: give each its own.")
    return Shown(format=chosen[0] if chosen else by_suffix, unit=units[unit.lower()], width=columns, **given)
