"""`memcalc timeline`: the memory of one step over time."""

from dataclasses import replace
from typing import Annotated, Any

import typer

from memcalc.cli.any_model import answer_for
from memcalc.cli.estimate_options import Request, with_job
from memcalc.cli.model_options import BASE, GENERIC, GENERIC_IGNORE, HEAD, LABELS, REVISION, TIMEOUT, TOKEN, WEIGHTS
from memcalc.errors import UsageError


@with_job
def command(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A path, a model of the Hub (ORG/NAME), a count such as 8B, or a framework's run file.",
            show_default=False,
        ),
    ],
    *,
    request: Request,
    of_run: Annotated[
        str | None,
        typer.Option(
            "--model",
            metavar="PATH|ID|COUNT",
            help="The model of a run file, in place of its own.",
            show_default=False,
            rich_help_panel="Model",
        ),
    ] = None,
    revision: Annotated[str | None, REVISION] = None,
    token: Annotated[str | None, TOKEN] = None,
    timeout: Annotated[str | None, TIMEOUT] = None,
    weights: Annotated[str | None, WEIGHTS] = None,
    base: Annotated[str | None, BASE] = None,
    generic: Annotated[bool, GENERIC] = False,
    generic_ignore: Annotated[str | None, GENERIC_IGNORE] = None,
    head: Annotated[str | None, HEAD] = None,
    num_labels: Annotated[str | None, LABELS] = None,
) -> None:
    """Draw the memory of one step over time: the six rows of the box stacked, the peak, phases and blocks.

    The axis counts allocations, not seconds. With --json the series is printed: of each piece of the step the fullest
    moment, and the largest of them is the peak that an estimate reports.
    """
    if request.chosen["markdown"]:
        raise UsageError("timeline answers with a picture or with --json; leave out --markdown.")
    how: dict[str, Any] = {"generic": generic, "generic_ignore": generic_ignore, "head": head, "num_labels": num_labels}
    where = {
        "revision": revision,
        "token": token,
        "timeout": timeout,
        "weights": weights,
        "base": base,
        "model": of_run,
    }
    answer_for(model, replace(request, chosen=request.chosen | {"timeline": True}), how, where)
