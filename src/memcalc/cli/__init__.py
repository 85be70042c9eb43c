"""The command line: one file per command. Nothing is computed here."""

import gc
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memcalc.cli.program import app

__all__ = ["app", "main"]


def main() -> None:
    """The console script."""
    # The process gives one answer and ends. Nearly all that it makes lives until then, so looking for garbage only
    # costs time, about a tenth of the whole.
    gc.disable()
    try:
        from memcalc.cli.program import app

        app(prog_name="memcalc")
    except KeyboardInterrupt:  # while something is being imported
        sys.exit(130)


def __getattr__(name: str) -> Any:
    """`app`, the Typer application, is made when it is first asked for."""
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from memcalc.cli.program import app

    return app
