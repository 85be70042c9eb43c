"""Errors, told to the person at the prompt: one sentence on stderr and an exit code, never a traceback."""

import errno
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import typer

from memcalc.common.escaping import quoted
from memcalc.errors import MemcalcError, UsageError, close_matches
from memcalc.render.terminal_text import visible

_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


@contextmanager
def plainly(context: Any = None) -> Iterator[None]:
    """Turn whatever goes wrong inside into a sentence on stderr and `typer.Exit` with the exit code of its kind.

    `context` is the parser's, where there is one already: messages name the command that it runs.
    """
    try:
        yield
    except (typer.Exit, typer.Abort):
        raise
    except MemcalcError as problem:
        raise _told(str(problem), problem.exit_code) from None
    except typer.TyperException as problem:
        raise _told(_parser_message(problem, context), problem.exit_code) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    except Exception as problem:
        if os.environ.get("MEMCALC_DEBUG"):
            raise
        if isinstance(problem, OSError) and problem.errno in _UNWRITABLE:  # Typer writes help and version itself
            raise _told(f"The answer could not be written ({problem.strerror}): write it elsewhere.", 1) from None
        kind = f"{type(problem).__name__}: {problem}" if str(problem) else type(problem).__name__
        raise _told(
            f"This is a fault in memcalc itself ({kind}): please report it with the command that you ran; "
            "MEMCALC_DEBUG=1 shows where it happened.",
            1,
        ) from None


def unknown_command(name: str, known: Iterable[str]) -> UsageError:
    """The error for a command that does not exist."""
    return UsageError(
        f"There is no command {quoted(name)}{close_matches(name, known) or ';'} `memcalc --help` lists them."
    )


def warn(text: str) -> None:
    """One line on stderr."""
    if sys.stderr is not None:
        sys.stderr.write(visible(text) + "\n")


def _told(message: str, exit_code: int) -> typer.Exit:
    warn(f"memcalc: {message}")
    return typer.Exit(exit_code)


def _parser_message(problem: typer.TyperException, context: Any) -> str:
    """What the parser of the command line says, and where its options are listed."""
    text = " ".join(problem.format_message().split()).rstrip(".")
    if (own := getattr(problem, "ctx", None)) is not None:
        path = own.command_path
    else:
        path = " ".join(["memcalc", *filter(None, [getattr(context, "invoked_subcommand", None)])])
    return f"{text}{'' if text.endswith('?') else ';'} `{path} --help` lists the options."
