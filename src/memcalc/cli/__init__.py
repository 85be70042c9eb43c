"""The command line: one file per command. Nothing is computed here."""

import gc
import os
import signal
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memcalc.cli.program import app

__all__ = ["ENVIRONMENT", "app", "main"]

ENVIRONMENT: dict[str, str] = {}
"""The environment that the process was started with, for a program that it starts."""


def main() -> None:
    """The console script."""
    # The process gives one answer and ends. Nearly all that it makes lives until then, so looking for garbage only
    # costs time, about a tenth of the whole.
    gc.disable()
    ENVIRONMENT.update(os.environ)
    os.environ["PYDANTIC_DISABLE_PLUGINS"] = "true"  # looking for them reads the metadata of every installed package
    sys.unraisablehook = _end_where_nothing_can_be_raised
    try:
        from memcalc.cli.program import app

        app(prog_name="memcalc")
    except KeyboardInterrupt:  # while something is being imported
        sys.exit(130)
    except SystemExit as leaving:
        if not leaving.code and sys.stdout is None:  # help and version are written by Typer, which does not mind
            from memcalc.cli.errors import warn
            from memcalc.cli.output import CLOSED

            warn(f"memcalc: {CLOSED}")
            sys.exit(1)
        raise
    finally:
        gc.freeze()  # nor is garbage looked for when the interpreter ends: a fifth of the whole
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # all is said: what is left is Python's own


def _end_where_nothing_can_be_raised(ignored: "sys.UnraisableHookArgs") -> None:
    """Ctrl-C that lands in a finalizer would be printed and forgotten. Nothing is being written there: end at once."""
    if issubclass(ignored.exc_type, KeyboardInterrupt):
        os._exit(130)
    sys.__unraisablehook__(ignored)


def __getattr__(name: str) -> Any:
    """`app`, the Typer application, is made when it is first asked for."""
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from memcalc.cli.program import app

    return app
