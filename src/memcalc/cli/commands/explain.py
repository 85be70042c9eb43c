"""`memcalc explain`: which tensors are alive at the peak, what made them, and why they are still there."""

import json
import os
import sys
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from memcalc.cli.any_model import answer_for
from memcalc.cli.job import Job, Request
from memcalc.cli.job_command import with_job
from memcalc.cli.model_options import MODEL, RUN_FILE, ModelOptions
from memcalc.cli.options import read_count
from memcalc.common.assumption import Assumption
from memcalc.common.escaping import quoted
from memcalc.errors import MemcalcError, UsageError, close_matches
from memcalc.report.schema import Report

if TYPE_CHECKING:
    from memcalc.models.spec import ModelSpec
    from memcalc.render.page_setup import Setup

_MOST_SHOWN = 20
"""Entries of the text where nobody says how many; JSON has all."""


def _option(name: str, text: str, metavar: str) -> Any:
    return typer.Option(name, help=text, metavar=metavar, show_default=False, rich_help_panel="Explanation")


@dataclass(frozen=True)
class Asked:
    """What is to be explained."""

    row: str | None
    phase: str | None
    at: str | None
    top: int | None
    oom: str | None = None


@dataclass(frozen=True)
class ExplainedJob(Job):
    """A job whose answer is an explanation in place of the box."""

    asked: Asked = Asked(None, None, None, None)

    def respond(self, spec: "ModelSpec", assumptions: tuple[Assumption, ...], teacher: "ModelSpec | None") -> None:
        """Explain and print."""
        if self.asked.oom is not None:
            self._name_allocation(self.asked.oom, spec, teacher)
            return
        from memcalc.provenance.explain import explain

        asked = self.asked
        found = explain(
            spec, self.setup, self.gpu, phase=asked.phase, at=asked.at, assumptions=assumptions, teacher=teacher
        )
        if self.shown.json:
            self.shown.write(
                json.dumps(found.shown(asked.row, asked.top).to_dict(), indent=2, ensure_ascii=False) + "\n"
            )
            return
        from memcalc.render.explanation import render

        shown = found.shown(asked.row, asked.top or _MOST_SHOWN)
        self.shown.write(render(shown, self.shown.columns, self.shown.unit, unicode=self.shown.unicode))

    def _name_allocation(self, message: str, spec: "ModelSpec", teacher: "ModelSpec | None") -> None:
        """Say which allocation an out-of-memory message is about."""
        from memcalc.provenance.oom import explain_oom
        from memcalc.provenance.oom_message import parse_message

        found = explain_oom(spec, self.setup, parse_message(message), self.gpu, teacher)
        if self.shown.json:
            self.shown.write(json.dumps(found.model_dump(mode="json"), indent=2, ensure_ascii=False) + "\n")
            return
        from memcalc.render.oom import render

        self.shown.write(render(found, self.shown.columns, self.shown.unit, unicode=self.shown.unicode))

    def show(self, report: Report, below: str = "", drawn: "Setup | None" = None) -> None:
        """A report without operations cannot be explained."""
        raise UsageError("explain needs a model whose operations memcalc knows; this one is counted by its weights.")


@with_job(without=("check", "markdown", "html", "svg"), groups=(MODEL, RUN_FILE))
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
    options: ModelOptions,
    of_run: str | None,
    request: Request,
    row: Annotated[str | None, _option("--row", "Only this row of the box, such as activations.", "ROW")] = None,
    phase: Annotated[
        str | None, _option("--phase", "The peak of a phase: forward, backward, step; prefill, decode.", "PHASE")
    ] = None,
    at: Annotated[
        str | None, _option("--at", 'A moment, such as "backward of block 3" or "forward of head and loss".', "MOMENT")
    ] = None,
    oom: Annotated[
        str | None,
        _option(
            "--oom",
            'What PyTorch said when memory ran out, or a log that has it: which allocation was "Tried to allocate"?',
            "MESSAGE|PATH|-",
        ),
    ] = None,
    top: Annotated[str | None, _option("--top", "How many, the largest first. [default: 20; all in JSON]", "N")] = None,
) -> None:
    """Show the tensors that are alive at the peak, the largest first: shape, what made each, why it is still there,
    when it dies, and its size as a formula. The sizes sum to the box."""
    request.shown().only("explain", "json", "snapshot")
    if request.chosen["check"]:
        raise UsageError("explain says what is there, so there is nothing to check; leave out --check.")
    if phase is not None and at is not None:
        raise UsageError("--phase and --at both name a moment: choose one.")
    if oom is not None and (row, phase, at, top) != (None, None, None, None):
        raise UsageError("--oom asks for one allocation; leave out --row, --phase, --at and --top.")
    message = None if oom is None else _message(oom)
    asked = Asked(_row(row), phase, at, None if top is None else read_count("--top", top), message)
    answer_for(model, replace(request, kind=partial(ExplainedJob, asked=asked)), options, of_run)


def _message(given: str) -> str:
    """The message that was pasted, or that of a log. Raises UsageError and MemcalcError."""
    from memcalc.provenance.oom_message import message_in

    if given != "-" and not os.path.isfile(given):
        return given
    try:
        if given == "-":
            found = message_in(sys.stdin)
        else:
            with open(given, encoding="utf-8", errors="replace") as file:
                found = message_in(file)
    except OSError as problem:
        raise MemcalcError(f"--oom {quoted(given)} cannot be read ({problem.strerror}).") from None
    if not found:
        raise UsageError(f'--oom {quoted(given)} has no line with PyTorch\'s "Tried to allocate"; paste the message.')
    return found


def _row(text: str | None) -> str | None:
    """A row of the box by its name or one of its words. Raises UsageError."""
    from memcalc.autograd.tape import ROWS

    if text is None:
        return None
    wanted = text.strip().lower().replace("-", "_").replace(" ", "_")
    found = [name for name in ROWS if wanted and (name.startswith(wanted) or name.endswith(f"_{wanted}"))]
    if len(found) != 1:
        near = close_matches(wanted, ROWS) or f": choose from {', '.join(ROWS)}."
        raise UsageError(f"--row cannot be {quoted(text)}{near}")
    return found[0]
