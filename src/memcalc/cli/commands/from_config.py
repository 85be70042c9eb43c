"""`memcalc from-config`: the files and launch lines of training and serving frameworks."""

import json as json_text
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from memcalc.cli.errors import warn
from memcalc.cli.job import Request
from memcalc.cli.job_command import with_job
from memcalc.cli.model_options import (
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
from memcalc.cli.options import declared
from memcalc.cli.parser import CommandWithLine, command_line
from memcalc.cli.run_file import OF_MODEL, estimate_run, refuse_path
from memcalc.cli.shown import Shown
from memcalc.common.escaping import quoted
from memcalc.errors import UsageError, close_matches, option_name

if TYPE_CHECKING:
    from memcalc.run_configs.mapping import Mapping

COMMAND_CLASS = CommandWithLine

_RUN = "Run files"


def _option(name: str, text: str, metavar: str | None = None) -> Any:
    return typer.Option(name, help=text, metavar=metavar, show_default=False, rich_help_panel=_RUN)


@with_job()
def command(
    context: typer.Context,
    files: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="FILE",
            help="A training or serving config, with its Accelerate, DeepSpeed or adapter file; a script with the "
            "launch line; - for standard input. A launch line, or options that override the file's, may follow --.",
            show_default=False,
        ),
    ] = None,
    *,
    request: Request,
    model: Annotated[str | None, _option("--model", "The model, in place of the file's own.", "PATH|ID|COUNT")] = None,
    show_setup: Annotated[bool, _option("--show-setup", "Print only what was read; no model is needed.")] = False,
    as_options: Annotated[bool, _option("--as-options", "Print the memcalc command that it stands for.")] = False,
    framework: Annotated[str | None, _option("--framework", "What the file is, where it is not told.", "NAME")] = None,
    release: Annotated[str | None, _option("--release", "Release of TRL that the file is for.", "X.Y")] = None,
    verbose: Annotated[bool, _option("--verbose", "List the keys that do not change memory, too.")] = False,
    revision: Annotated[str | None, REVISION] = None,
    token: Annotated[str | None, TOKEN] = None,
    timeout: Annotated[str | None, TIMEOUT] = None,
    weights: Annotated[str | None, WEIGHTS] = None,
    generic: Annotated[bool, GENERIC] = False,
    generic_ignore: Annotated[str | None, GENERIC_IGNORE] = None,
    head: Annotated[str | None, HEAD] = None,
    num_labels: Annotated[str | None, LABELS] = None,
) -> None:
    """Estimate the run that files or a launch line describe: axolotl, LLaMA-Factory, TRL, Transformers, PEFT,
    Accelerate, DeepSpeed, torchtune, torchtitan, ms-swift, Unsloth, vLLM, llama.cpp, and of diffusion models
    diffusers, sd-scripts, ai-toolkit, SimpleTuner and OneTrainer. Nothing of them is run."""
    from memcalc.run_configs.read import read

    line = command_line(context)
    if not files and not line:
        raise UsageError("from-config needs a file, or a launch line after --: memcalc from-config FILE.")

    def reread(words: Sequence[str]) -> "Mapping":
        return read(files or (), [*line, *words], framework=_framework(framework), release=_release(release))

    found = reread(())
    found.model = found.model if model is None else model
    if show_setup or as_options:
        shown = request.shown()
        shown.only("what was read" if show_setup else "--as-options", *(() if as_options else ("json",)))
        _put_given(found, request)
        shown.write(_shown(found, shown, as_options=as_options, verbose=verbose))
        return
    if model is None:
        refuse_path(found)
    estimate_run(
        found,
        request,
        {
            "generic": generic,
            "generic_ignore": generic_ignore,
            "head": head or found.setup.get("task"),
            "num_labels": num_labels,
        },
        {"revision": revision, "token": token, "timeout": read_timeout(timeout), "weights": weights},
        None if "-" in (files or ()) else reread,  # standard input cannot be read twice
    )


def _framework(name: str | None) -> str:
    from memcalc.run_configs.read import FRAMEWORKS

    if name is None:
        return ""
    plain = name.lower().replace("-", "").replace("_", "").replace(".", "").replace("huggingface", "hf")
    known = {known.replace("-", ""): known for known in FRAMEWORKS}
    if plain not in known:
        near = close_matches(plain, known) or f": choose from {', '.join(FRAMEWORKS)}."
        raise UsageError(f"--framework cannot be {quoted(name)}{near}")
    return known[plain]


def _release(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    parts = text.removeprefix("v").split(".")
    if not all(part.isdecimal() and len(part) < 6 for part in parts) or len(parts) < 2:
        raise UsageError(f"--release needs a release such as 0.18, not {quoted(text)}.")
    return int(parts[0]), int(parts[1])


def _put_given(found: "Mapping", request: Request) -> None:
    """Let options of memcalc's own count for what is shown too. Raises UsageError for those that need an estimate."""
    for name in ("check", "gpu"):
        if request.chosen.get(name):
            raise UsageError(f"--{name} is for the estimate, and only what was read is shown; leave it out.")
    for name, value in request.given.items():
        if value is not None:
            found.setup[name] = declared()[name].read(value)
            found.asked = [sentence for sentence in found.asked if f"{option_name(name)} " not in sentence]


def _shown(found: "Mapping", shown: Shown, *, as_options: bool, verbose: bool) -> str:
    """What was read: a command line, JSON or a table."""
    from memcalc.run_configs import output as written

    if as_options:
        known = {*declared(), *(() if written.is_count(found) else OF_MODEL)}
        if found.setup.get("parallel") == "fsdp1":
            known.discard("cpu_offload")  # its offloading is not modelled
        lost = [name for name in found.setup if name not in known]
        for sentence in (
            *found.asked,
            *(f"{option_name(name)} is left out: this command line cannot have it" for name in lost),
        ):
            warn(sentence)
        return written.as_options(found, known) + "\n"
    if shown.json:
        return json_text.dumps(written.as_json(found), indent=2, ensure_ascii=False) + "\n"
    from memcalc.render.run_config import render
    from memcalc.render.terminal_text import visible

    text = render(found, verbose=verbose)
    return "".join(visible(line, shown.unicode) + "\n" for line in text.splitlines())
