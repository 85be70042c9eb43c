"""`memcalc timeline`: the memory of one step over time."""

import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

import typer

from memcalc.cli.any_model import answer_for
from memcalc.cli.job import Job, Request
from memcalc.cli.job_command import with_job
from memcalc.cli.model_options import MODEL, RUN_FILE, ModelOptions
from memcalc.common.assumption import Assumption
from memcalc.errors import UsageError
from memcalc.report.schema import Report

if TYPE_CHECKING:
    from memcalc.models.spec import ModelSpec
    from memcalc.render.page_setup import Setup


@dataclass(frozen=True)
class DrawnJob(Job):
    """A job whose answer is its step over time in place of the box."""

    def respond(self, spec: "ModelSpec", assumptions: tuple[Assumption, ...], teacher: "ModelSpec | None") -> None:
        """Draw and print."""
        from memcalc.render import styles, timeline
        from memcalc.timeline import SAMPLES
        from memcalc.timeline import timeline as series

        shown = self.shown
        pieces = timeline.columns(shown.columns) if shown.format == "text" else SAMPLES
        found = series(spec, self.setup, self.gpu, assumptions=assumptions, teacher=teacher, samples=pieces)

        def text() -> str:
            lines = timeline.render(found, shown.columns, shown.unit, unicode=shown.unicode, colour=shown.coloured)
            return styles.coloured(lines) if shown.coloured else styles.plain(lines)

        drawn = self.page_setup(spec, assumptions, teacher) if shown.pictured else None
        texts = {"text": text, "json": lambda: json.dumps(found.to_dict()) + "\n"}
        shown.answer(texts, [] if drawn is None else [drawn], None if drawn is None else drawn.timeline)
        self.check_fit(found.report)

    def show(self, report: Report, below: str = "", drawn: "Setup | None" = None) -> None:
        """A report without operations has no timeline."""
        raise UsageError("a timeline needs a model whose operations memcalc knows; this one is counted by weights.")


@with_job(without=("markdown",), groups=(MODEL, RUN_FILE))
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
) -> None:
    """Draw the memory of one step over time: the six rows of the box stacked, the peak, phases and blocks.

    The axis counts allocations, not seconds. With --json the series is printed: of each piece of the step the fullest
    moment, and the largest of them is the peak that an estimate reports. --svg and --html write pictures to share.
    """
    request.shown().only("timeline", "json", "html", "svg", "snapshot")
    answer_for(model, replace(request, kind=DrawnJob), options, of_run)
