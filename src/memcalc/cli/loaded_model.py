"""The answer for a model whose files were read, on disk or on the Hub."""

from dataclasses import replace
from typing import TYPE_CHECKING

from memcalc.cli.job import Job
from memcalc.cli.model_options import FOR_TRANSFORMERS, read_head
from memcalc.common.assumption import Assumption
from memcalc.errors import UsageError

if TYPE_CHECKING:
    from memcalc.sources import LoadedModel


def answer(  # noqa: PLR0913 (the options of three commands)
    job: Job,
    model: "LoadedModel",
    name: str,
    *,
    generic: bool,
    generic_ignore: str | None,
    head: str | None,
    num_labels: str | None,
    assumptions: tuple[Assumption, ...] = (),
) -> None:
    """Estimate what was loaded, under `name`; what its reader noticed joins the `assumptions`."""
    how = {"generic": generic, "generic_ignore": generic_ignore, "head": head, "num_labels": num_labels}
    passed_over, labels = read_head(how, pipeline=model.is_pipeline)
    if model.is_pipeline:
        from memcalc.sources.diffusers_report import pipeline_report
        from memcalc.sources.diffusers_spec import describe_pipeline

        if job.teacher is not None:
            raise UsageError(FOR_TRANSFORMERS)
        if (found := describe_pipeline(model, name, job.setup)) is not None:
            replace(job, setup=found.setup).answer(found.spec, (*assumptions, *found.assumptions))
            return
        job.show(pipeline_report(model, name, job.setup, job.gpu))
        return
    if (model.config or {}).get("model_type") is None and not generic:
        from memcalc.sources.weights_only import timm_architecture, timm_report

        if timm_architecture(model) is not None:
            job.show(timm_report(model, name, job.setup, job.gpu))
            return
    from memcalc.sources.model_spec import describe

    found = describe(model, name, job.setup, generic=generic, generic_ignore=passed_over)
    with (model.base or model).naming_its_file():
        replace(job, setup=found.setup).answer(found.spec.with_head(head, labels), (*assumptions, *found.assumptions))
