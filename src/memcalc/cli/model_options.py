"""What the commands for models outside share: options of `from-file`, `from-hub` and `inspect`, and their answer."""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import typer

from memcalc.cli.job import Job
from memcalc.cli.options import read_count, read_value
from memcalc.common.assumption import Assumption
from memcalc.errors import UsageError

if TYPE_CHECKING:
    from memcalc.sources import LoadedModel

_HEADING = "Model"
LONGEST_TIMEOUT = 3600.0

WEIGHTS = typer.Option(
    "--weights",
    metavar="NAME",
    help="One weight file or GGUF type, where there are several.",
    show_default=False,
    rich_help_panel=_HEADING,
)
BASE = typer.Option(
    "--base",
    metavar="MODEL",
    help="The base model of an adapter, in place of the one that it names.",
    show_default=False,
    rich_help_panel=_HEADING,
)
GENERIC = typer.Option(
    "--generic", help="Estimate a decoder of an unknown family as a Llama-like one.", rich_help_panel=_HEADING
)
GENERIC_IGNORE = typer.Option(
    "--generic-ignore",
    metavar="KEYS",
    help="Keys of the config, with commas, that --generic passes over though they change the answer.",
    show_default=False,
    rich_help_panel=_HEADING,
)
HEAD = typer.Option(
    "--task",
    metavar="TASK",
    show_default="the one that the config names",
    rich_help_panel=_HEADING,
    help="Head to train: causal-lm, masked-lm, seq2seq-lm, sequence-classification, token-classification, "
    "question-answering, image-classification or embedding.",
)
LABELS = typer.Option(
    "--num-labels",
    metavar="N",
    help="Classes of a classification head.",
    show_default="the config's",
    rich_help_panel=_HEADING,
)
REVISION = typer.Option(
    "--revision",
    metavar="REVISION",
    help="Branch, tag or commit.",
    show_default="the main branch",
    rich_help_panel=_HEADING,
)
TOKEN = typer.Option(
    "--token",
    metavar="TOKEN",
    help="Access token for gated and private models.",
    show_default="the login's",
    rich_help_panel=_HEADING,
)
TIMEOUT = typer.Option(
    "--timeout",
    metavar="SECONDS",
    help="Longest time that the Hub may take for everything.",
    show_default="30",
    rich_help_panel=_HEADING,
)


def read_timeout(text: str | None) -> float:
    """Seconds of --timeout. Raises UsageError."""
    if text is None:
        return 30.0
    seconds: float = read_value("--timeout", float, text)
    if not 0 < seconds <= LONGEST_TIMEOUT:
        raise UsageError(
            f"--timeout must be more than 0 and at most {LONGEST_TIMEOUT:.0f} seconds, not {text.strip()}."
        )
    return seconds


_FOR_TRANSFORMERS = "--generic and --teacher are for transformers; a diffusion pipeline has no use for them."


def read_head(how: Mapping[str, Any], *, pipeline: bool) -> tuple[list[str], int | None]:
    """The keys of --generic-ignore and the number of --num-labels.

    Args:
        how: the options generic, generic_ignore, head and num_labels as they were given.
        pipeline: whether the model is a diffusion pipeline.

    Raises:
        UsageError: one of them says nothing about such a model.
    """
    if how["generic_ignore"] is not None and not how["generic"]:
        raise UsageError("--generic-ignore names keys that --generic passes over; add --generic, or leave it out.")
    labels = None if how["num_labels"] is None else read_count("--num-labels", how["num_labels"])
    if pipeline and (how["head"] is not None or labels is not None):
        raise UsageError("--task and --num-labels choose what a transformer is trained for; a pipeline has none.")
    if pipeline and how["generic"]:
        raise UsageError(_FOR_TRANSFORMERS)
    from memcalc.nn.module_paths import split_names

    return sorted(split_names(how["generic_ignore"] or "")), labels


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
    passed_over, labels = read_head(how, pipeline=bool(model.components))
    if model.components:
        from memcalc.sources.diffusers_report import pipeline_report
        from memcalc.sources.diffusers_spec import describe_pipeline

        if job.teacher is not None:
            raise UsageError(_FOR_TRANSFORMERS)
        if (found := describe_pipeline(model, name, job.setup)) is not None:
            replace(job, setup=found.setup).answer(found.spec, found.assumptions)
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
