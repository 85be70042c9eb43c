"""`memcalc from-file`: a model on disk."""

from typing import Annotated

import typer

from memcalc.cli.job import Job
from memcalc.cli.job_command import with_job
from memcalc.cli.loaded_model import answer
from memcalc.cli.model_options import ADAPTER, BASE, GENERIC, GENERIC_IGNORE, HEAD, LABELS, WEIGHTS
from memcalc.sources.display_names import short_name


@with_job()
def command(
    path: Annotated[
        str,
        typer.Argument(
            metavar="PATH", help="A config.json, a model's folder, a .safetensors or .gguf file.", show_default=False
        ),
    ],
    *,
    job: Job,
    weights: Annotated[str | None, WEIGHTS] = None,
    base: Annotated[str | None, BASE] = None,
    adapter: Annotated[str | None, ADAPTER] = None,
    generic: Annotated[bool, GENERIC] = False,
    generic_ignore: Annotated[str | None, GENERIC_IGNORE] = None,
    head: Annotated[str | None, HEAD] = None,
    num_labels: Annotated[str | None, LABELS] = None,
) -> None:
    """Estimate the model of a config.json, of a folder that holds one, or of a checkpoint. Weights are not read."""
    from memcalc.sources import load

    answer(
        job,
        load(path, kind="file", weights=weights, base=base, adapter=adapter),
        short_name(path),
        generic=generic,
        generic_ignore=generic_ignore,
        head=head,
        num_labels=num_labels,
    )
