"""`memcalc estimate`: a model that exists only as a parameter count or as shape numbers."""

from typing import Annotated, Any

import typer

from memcalc.cli.job import Job
from memcalc.cli.job_command import with_job
from memcalc.cli.shape_options import SHAPE_OF_A_COUNT
from memcalc.common.escaping import quoted
from memcalc.errors import UsageError
from memcalc.units import parse_parameters


@with_job(groups=(SHAPE_OF_A_COUNT,))
def command(
    count: Annotated[
        str | None,
        typer.Argument(metavar="COUNT", help="Parameters, such as 4B: the same as --params.", show_default=False),
    ] = None,
    *,
    job: Job,
    shape: dict[str, Any],
    params: Annotated[
        str | None,
        typer.Option(
            "--params",
            "-p",
            metavar="COUNT",
            show_default=False,
            rich_help_panel="Model",
            help="Parameters, such as 4B, 350M or 8030261248; a shape for that count is chosen and stated.",
        ),
    ] = None,
) -> None:
    """Estimate a decoder from a parameter count, from shape numbers, or from both."""
    if count is not None and params is not None:
        raise UsageError(f"{quoted(count)} and --params say the same: give one of them.")
    params = count if params is None else params
    if params is None and not shape:
        raise UsageError("estimate needs a model: give --params, such as --params 4B, or shape numbers.")
    from memcalc.models.llama_shape import canonical_spec

    spec, assumptions = canonical_spec(None if params is None else parse_parameters(params), **shape)
    job.answer(spec, assumptions)
