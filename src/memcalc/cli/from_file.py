"""`memcalc from-file`: the model of a config.json."""

from typing import Annotated

import typer

from memcalc.cli.job import Job, with_job
from memcalc.sources.config import read_config


@with_job
def command(
    path: Annotated[
        str, typer.Argument(help="A config.json, or a folder that holds one.", metavar="PATH", show_default=False)
    ],
    *,
    job: Job,
) -> None:
    """Estimate the model of a config.json, or of a folder that holds one."""
    from memcalc.model.spec import ModelSpec

    config, name = read_config(path)
    job.answer(ModelSpec.from_config(config, name))
