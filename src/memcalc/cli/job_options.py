"""Options of a job that are no fields of its setup, as parameters of a command."""

from inspect import Parameter
from typing import Annotated, Any

import typer

from memcalc.cli.options import SETUPS


def _complete_gpu(incomplete: str) -> list[str]:
    from memcalc.tables.gpus import GPUS

    return [gpu.name for gpu in GPUS if gpu.name.startswith(incomplete)]


def _complete_mode(incomplete: str) -> list[str]:
    return [mode for mode in SETUPS if mode.startswith(incomplete)]


def _complete_unit(incomplete: str) -> list[str]:
    return [unit for unit in ("GiB", "GB") if unit.startswith(incomplete)]


def job_options() -> list[Parameter]:
    """The mode, the GPU and what else says what is estimated."""
    return [
        _option("mode", str, "training", "What the model is used for.", "Mode", "training|inference", _complete_mode),
        _option(
            "gpu",
            str | None,
            None,
            "GPU to fit: a name of `memcalc gpus`, or a size such as 24GB.",
            "GPU",
            "NAME|SIZE",
            _complete_gpu,
        ),
        _option(
            "teacher",
            str | None,
            None,
            "Teacher of --objective distillation and gkd: a path, a model of the Hub, or a size.",
            "Objective",
            "PATH|ORG/NAME|SIZE",
        ),
        _option("check", bool, False, "Exit with code 3 when the job does not fit the --gpu.", "GPU"),
    ]


def output_options() -> list[Parameter]:
    """The options that say how the answer is shown, and where."""
    heading = "Output"
    return [
        _option("json", bool, False, "Print one JSON object; `memcalc schema` describes it.", heading),
        _option("markdown", bool, False, "Print a Markdown table.", heading),
        _option("html", str | None, None, "Also write a page with pictures to this file.", heading, "FILE"),
        _option("svg", str | None, None, "Also write the step over time, as a picture, to this file.", heading, "FILE"),
        _option(
            "snapshot",
            str | None,
            None,
            "Also write the step as PyTorch's memory snapshot, for its memory viewer; `compare` reads a real one.",
            heading,
            "FILE",
        ),
        _option(
            "output",
            str | None,
            None,
            "Write the answer to this file, whole or not at all, and print nothing; without an option that chooses, "
            ".json, .md, .html and .svg choose the format.",
            heading,
            "FILE",
        ),
        _option("unit", str, "GiB", "Unit of sizes.", heading, "GiB|GB", _complete_unit),
        _option("ascii", bool, False, "Draw with ASCII characters only.", heading),
        _option(
            "width",
            str | None,
            None,
            "Width of the box in columns; for a denoiser, of the picture in pixels.",
            heading,
            "N",
            unset="the terminal's",
        ),
        _option("color", bool | None, None, "Colours.", heading, unset="on a terminal without NO_COLOR"),
    ]


def _option(  # noqa: PLR0913 (what typer.Option takes)
    name: str,
    kind: Any,
    default: Any,
    text: str,
    heading: str,
    metavar: str | None = None,
    complete: Any = None,
    unset: str = "",
) -> Parameter:
    both = f"--{name}/--no-{name}" if kind == bool | None else f"--{name}"
    shown = unset if default is None or isinstance(default, bool) else str(default)
    info = typer.Option(
        both, help=text, show_default=shown or False, metavar=metavar, rich_help_panel=heading, autocompletion=complete
    )
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, info])
