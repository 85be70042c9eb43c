"""`memcalc fit`: the largest job that fits a GPU, and the smallest GPU for the job."""

import json
from dataclasses import replace
from typing import Annotated, Any

import typer

from memcalc.cli.job import Job, Request
from memcalc.cli.job_command import with_job
from memcalc.cli.model_options import MODEL, ModelOptions
from memcalc.cli.read_model import read_model
from memcalc.errors import UsageError, option_name
from memcalc.render import tables
from memcalc.render.terminal_text import visible
from memcalc.setup.setup import TrainingSetup
from memcalc.units import format_bytes


@with_job(without=("check", "html", "svg", "snapshot"), groups=(MODEL,))
def command(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="A path, a model of the Hub (ORG/NAME), or a count such as 8B.", show_default=False
        ),
    ],
    *,
    options: ModelOptions,
    request: Request,
    budget: Annotated[
        str | None,
        typer.Option(
            "--budget", metavar="SIZE", show_default=False, rich_help_panel="GPU", help="Memory, in place of --gpu."
        ),
    ] = None,
) -> None:
    """Find the largest micro-batch, the longest sequence and the largest LoRA rank that fit, all else as given.

    Several GPUs are given with commas. Every number is found by estimating: one more does not fit.
    """
    chosen = dict(request.chosen)
    shown = request.shown()
    shown.only("fit", "json", "markdown")
    if chosen["check"]:
        raise UsageError("fit says what fits, so there is nothing to check; leave out --check.")
    request.refuse(
        ("lengths", "max_steps", "seed"),
        "is about a run of many lengths, which fit would simulate for every number it tries; give --seq-len with the "
        "longest length, or one setup with --lengths to `memcalc estimate`.",
    )
    if (chosen["gpu"] is None) == (budget is None):
        raise UsageError("fit needs a GPU or a budget: give --gpu, such as --gpu RTX-4090,A100-80GB, or --budget 20GB.")
    names = [name.strip() for name in (budget or chosen["gpu"]).split(",")]
    jobs = [Request(request.mode, request.given, chosen | {"gpu": name}).read() for name in names]
    found = read_model(model, options).described(jobs[0].setup)  # which is the same, whatever GPU is asked about
    spec = found.spec
    jobs = [replace(job, setup=found.setup) for job in jobs]
    from memcalc.decide.largest import smallest_gpu

    smallest = smallest_gpu(spec, found.setup)
    answers = [_answer(spec, job, job.gpu, smallest) for job in jobs]
    if shown.json:
        shown.write(json.dumps({"model": spec.name, "gpus": answers}, indent=2) + "\n")
        return
    title, rows = _table(model, jobs[0], answers)
    table = (("GPU", "what", "answer", "process"), rows, (3,))
    shown.write(
        title
        + (
            tables.text(*table, shown.unicode, shown.columns)
            if shown.format == "text"
            else "\n" + tables.markdown(*table)
        )
    )


def _answer(spec: Any, job: Job, gpu: Any, smallest: Any) -> dict[str, Any]:
    """What fits one GPU, as plain values; `smallest` is the least GPU of the table that the job fits."""
    from memcalc.decide.largest import largest
    from memcalc.decide.what_fits import advise
    from memcalc.estimation.estimate import estimate
    from memcalc.estimation.process import needed_bytes
    from memcalc.models.registry import autoencoders, denoisers

    setup = job.setup
    report = estimate(spec, setup, gpu)
    assert report.gpu is not None
    found = {
        "gpu": gpu.name,
        "usable_bytes": gpu.usable_bytes,
        "process_bytes": report.peak.process_bytes,
        "needed_bytes": needed_bytes(spec, setup, gpu),
        "fits": report.gpu.fits,
    }
    reads_text = spec.model_type not in (*denoisers(), *autoencoders())
    fields = (
        ["batch"]
        + ["seq_len"] * reads_text
        + (["lora_rank"] if isinstance(setup, TrainingSetup) and setup.lora_rank else [])
    )
    for field in fields:
        most = largest(spec, setup, gpu, field)
        found[f"largest_{field}"] = most.value
        found[f"process_bytes_at_largest_{field}"] = most.process_bytes
    found["smallest_gpu"] = None if smallest is None else smallest.name
    if isinstance(setup, TrainingSetup) and not report.gpu.fits:
        found["remedies"] = advise(spec, setup, gpu).reported().model_dump()
    return found


_TITLES = {"batch": "largest micro-batch", "seq_len": "longest sequence", "lora_rank": "largest LoRA rank"}


def _table(name: str, job: Job, answers: list[dict[str, Any]]) -> tuple[str, list[tuple[str, ...]]]:
    """A line about the job, and the rows of the table."""
    unit = job.shown.unit
    given = {key: getattr(job.setup, key) for key in ("batch", "seq_len", "lora_rank") if hasattr(job.setup, key)}
    rows: list[tuple[str, ...]] = []
    for found in answers:
        fits = "fits" if found["fits"] else "does not fit"
        rows.append((found["gpu"], "as given", fits, format_bytes(found["process_bytes"], unit)))
        if found["needed_bytes"] is not None:
            rows.append(("", "least memory it runs on", "", format_bytes(found["needed_bytes"], unit)))
        for field, title in _TITLES.items():
            if f"largest_{field}" in found:
                value = found[f"largest_{field}"]
                size = format_bytes(found[f"process_bytes_at_largest_{field}"], unit) if value else ""
                rows.append(("", f"{title} ({option_name(field)})", f"{value:,}" if value else "none fits", size))
        rows.append(("", "smallest GPU as given", found["smallest_gpu"] or "none of `memcalc gpus`", ""))
        remedies = found.get("remedies")
        if remedies:
            gpus = remedies["fewest_gpus"]
            rows.append(("", "fewest GPUs that share it (--gpus)", "none" if gpus is None else f"{gpus:,}", ""))
        if remedies and remedies["change"]:
            size = format_bytes(remedies["process_bytes"], unit)
            rows.append(("", "fits with", remedies["change"], size))
    said = ", ".join(f"{option_name(key)} {value}" for key, value in given.items() if value is not None)
    mode = "training" if isinstance(job.setup, TrainingSetup) else "inference"
    return visible(f"{name}, {mode}: {said}") + "\n", rows
