"""`memcalc from-hub`: a model of the Hugging Face Hub."""

from typing import Annotated

import typer

from memcalc.cli.errors import warn
from memcalc.cli.job import Job
from memcalc.cli.job_command import with_job
from memcalc.cli.loaded_model import answer
from memcalc.cli.model_options import (
    ADAPTER,
    BASE,
    GENERIC,
    GENERIC_IGNORE,
    HEAD,
    LABELS,
    REVISION,
    TIMEOUT,
    TOKEN,
    WEIGHTS,
    read_timeout,
)


@with_job()
def command(
    name: Annotated[
        str,
        typer.Argument(metavar="ORG/NAME", help="A model of the Hub, or the address of its page.", show_default=False),
    ],
    *,
    job: Job,
    revision: Annotated[str | None, REVISION] = None,
    token: Annotated[str | None, TOKEN] = None,
    timeout: Annotated[str | None, TIMEOUT] = None,
    weights: Annotated[str | None, WEIGHTS] = None,
    base: Annotated[str | None, BASE] = None,
    adapter: Annotated[str | None, ADAPTER] = None,
    generic: Annotated[bool, GENERIC] = False,
    generic_ignore: Annotated[str | None, GENERIC_IGNORE] = None,
    head: Annotated[str | None, HEAD] = None,
    num_labels: Annotated[str | None, LABELS] = None,
) -> None:
    """Estimate a model of the Hub from its config and the headers of its weights; no weights are downloaded."""
    from memcalc.sources import load

    model = load(
        name,
        kind="hub",
        revision=revision,
        token=token,
        timeout=read_timeout(timeout),
        weights=weights,
        base=base,
        adapter=adapter,
        progress=warn,
    )
    answer(job, model, model.name, generic=generic, generic_ignore=generic_ignore, head=head, num_labels=num_labels)
