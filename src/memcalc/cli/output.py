"""Writing the answer: what the stream can show, and streams that close or fail."""

import os
import sys
from collections.abc import Mapping, Sequence
from typing import TextIO

import typer

from memcalc.errors import MemcalcError
from memcalc.render.terminal_text import cells, visible


def write(text: str) -> None:
    """Write the answer to stdout. A reader that has gone away has what it wanted, so that is no error.

    Raises:
        MemcalcError: the stream fails in another way, such as a full disk.
    """
    stream = sys.stdout
    if stream is None:
        return
    try:
        stream.write(text)
        stream.flush()
    except BrokenPipeError:
        _silence(stream)
    except OSError as problem:
        _silence(stream)
        raise MemcalcError(f"The answer could not be written ({problem.strerror}): write it elsewhere.") from None


def _silence(stream: TextIO) -> None:
    """Let what is still buffered go nowhere: Python would complain about it when it exits."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    except (OSError, ValueError):
        return


def speaks_unicode() -> bool:
    """Whether stdout takes every character."""
    encoding = getattr(sys.stdout, "encoding", None) or ""
    return encoding.lower().replace("-", "").replace("_", "").startswith("utf")


def wants_colour() -> bool:
    """Whether stdout is a terminal that shows colours, and nobody said no (https://no-color.org)."""
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return False
    return sys.stdout is not None and sys.stdout.isatty()


def terminal_width() -> int:
    """Columns of the terminal, or of `COLUMNS`; 80 where there is no terminal."""
    import shutil

    return shutil.get_terminal_size((80, 24)).columns


JSON = typer.Option("--json", help="Print the table as JSON, a list of objects; sizes are bytes.")
"""The option of commands that print tables."""


def print_json(rows: Sequence[Mapping[str, object]]) -> None:
    """Write rows as one JSON list."""
    import json

    write(json.dumps(rows, indent=2, ensure_ascii=False) + "\n")


def print_table(heads: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> None:
    """Write a table with aligned columns; those in `right` are aligned to the right."""
    table = [tuple(visible(cell, speaks_unicode()) for cell in row) for row in (heads, *rows)]
    widths = [max(cells(row[column]) for row in table) for column in range(len(heads))]

    def padded(column: int, text: str) -> str:
        space = " " * (widths[column] - cells(text))
        return space + text if column in right else text + space

    write("".join("  ".join(padded(*item) for item in enumerate(row)).rstrip() + "\n" for row in table))
