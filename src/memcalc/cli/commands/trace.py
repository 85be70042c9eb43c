"""`memcalc trace`: the tape of one step, for whoever looks for a wrong number."""

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
from memcalc.errors import UsageError
from memcalc.report.schema import Report

if TYPE_CHECKING:
    from memcalc.models.spec import ModelSpec
    from memcalc.render.page_setup import Setup


def _option(name: str, text: str, metavar: str) -> Any:
    return typer.Option(name, help=text, metavar=metavar, show_default=False, rich_help_panel="Tape")


@dataclass(frozen=True)
class TracedJob(Job):
    """A job whose answer is its tape."""

    phase: str | None = None
    around_peak: int | None = None

    def respond(self, spec: "ModelSpec", assumptions: tuple[Assumption, ...], teacher: "ModelSpec | None") -> None:
        """Trace and print."""
        from memcalc.provenance.listing import listing

        lines = listing(spec, self.setup, phase=self.phase, around_peak=self.around_peak, teacher=teacher)
        if self.shown.json:
            import json

            self.shown.write(json.dumps([vars(line) for line in lines], ensure_ascii=False) + "\n")
            return
        from memcalc.render.tape import render

        self.shown.write(render(lines, unicode=self.shown.unicode))

    def show(self, report: Report, below: str = "", drawn: "Setup | None" = None) -> None:
        """A report without operations has no tape."""
        raise UsageError("trace needs a model whose operations memcalc knows; this one is counted by its weights.")


@with_job(without=("check", "markdown", "html", "svg", "snapshot"), groups=(MODEL, RUN_FILE))
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
    phase: Annotated[
        str | None, _option("--phase", "Only this phase: forward, backward; prefill, decode.", "PHASE")
    ] = None,
    around_peak: Annotated[
        str | None, _option("--around-peak", "Only so many samples before and after the peak.", "N")
    ] = None,
) -> None:
    """List what a step allocates, in order: when each tensor is born and dies, its bytes and those that are alive then,
    its row and part of the box, the block that ran, and what made it. With --json a list of objects."""
    request.shown().only("trace", "json")
    if request.chosen["check"]:
        raise UsageError("trace says what is allocated, so there is nothing to check; leave out --check.")
    span = None if around_peak is None else read_count("--around-peak", around_peak)
    traced = partial(TracedJob, phase=phase, around_peak=span)
    answer_for(model, replace(request, kind=traced), options, of_run)
