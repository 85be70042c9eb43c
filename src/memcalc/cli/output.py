"""Writing the answer: what the stream can show, and streams that close or fail."""

import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TextIO

import typer

from memcalc.errors import MemcalcError
from memcalc.render.terminal_text import encodable, visible

if TYPE_CHECKING:
    from rich.console import Console

    from memcalc.render.tables import Column

CLOSED = "The answer could not be written: standard output is closed."


def write(text: str) -> None:
    """Write the answer to stdout. A reader that has gone away has what it wanted, so that is no error.

    Characters that the stream cannot encode are written in ASCII.

    Raises:
        MemcalcError: there is no stdout, or it fails in another way, such as a full disk.
    """
    stream = sys.stdout
    if stream is None:
        raise MemcalcError(CLOSED)
    try:
        stream.write(encodable(text, stream.encoding, stream.errors))
        stream.flush()
    except BrokenPipeError:
        _silence(stream)
    except OSError as problem:
        _silence(stream)
        raise MemcalcError(f"The answer could not be written ({problem.strerror}): write it elsewhere.") from None
    except ValueError:  # of a closed file
        raise MemcalcError(CLOSED) from None


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
    """Whether stdout shows colours: as a terminal does, unless NO_COLOR or FORCE_COLOR is set, which Rich heeds too."""
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    if os.environ.get("TERM") in ("dumb", "unknown"):
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


def console() -> "Console":
    """Rich's view of stdout: its width, its colours (NO_COLOR, FORCE_COLOR, TERM) and its characters."""
    from rich.console import Console

    return Console(highlight=False, markup=False, emoji=False, soft_wrap=False)


def print_table(columns: Sequence["Column"], rows: Sequence[Sequence[str]]) -> None:
    """Write a table for this terminal, or for a pipe."""
    from memcalc.render import tables

    write(tables.laid_out(columns, rows, unicode=speaks_unicode(), width=terminal_width()))


def print_text(text: str) -> None:
    """Write `text`, wrapped at words."""
    from memcalc.render.terminal_text import wrap

    write("".join(line + "\n" for line in wrap(visible(text, speaks_unicode()), terminal_width())))


def print_fields(fields: Sequence[tuple[str, str]]) -> None:
    """Write names with their values, which wrap beside them."""
    from memcalc.render import tables

    write(tables.fields(fields, unicode=speaks_unicode(), width=terminal_width()))
