"""`memcalc verify`: the user's own script for a few steps, its real peaks beside the estimate."""

import json
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from memcalc.cli.any_model import answer_for
from memcalc.cli.errors import warn
from memcalc.cli.job import Job, Request
from memcalc.cli.job_command import with_job
from memcalc.cli.model_options import MODEL, RUN_FILE, ModelOptions
from memcalc.cli.options import read_count
from memcalc.cli.parser import CommandWithLine, command_line
from memcalc.common.assumption import Assumption
from memcalc.errors import MemcalcError, UsageError
from memcalc.report.schema import Report

if TYPE_CHECKING:
    from memcalc.models.spec import ModelSpec
    from memcalc.render.page_setup import Setup
    from memcalc.verification.run import Measured

COMMAND_CLASS = CommandWithLine
_STEPS = 3


@dataclass(frozen=True)
class VerifiedJob(Job):
    """A job whose answer is a real run of it beside its estimate."""

    command: tuple[str, ...] = ()
    steps: int = _STEPS

    def respond(self, spec: "ModelSpec", assumptions: tuple[Assumption, ...], teacher: "ModelSpec | None") -> None:
        """Estimate, run, and print both."""
        from memcalc.estimation.estimate import estimate
        from memcalc.verification.run import measured_in_a_folder

        report = estimate(spec, self.setup, self.gpu, assumptions=assumptions, teacher=teacher)
        measured, folder = measured_in_a_folder(self.command, self.steps)
        with folder:
            self._print(measured, report)
            if not self.shown.json and teacher is None:
                self._say_what_differs(measured, spec)
        self._keep(measured)

    def _print(self, measured: "Measured", report: Report) -> None:
        from memcalc.verification.verify import verified

        found = verified(measured, report)
        if self.shown.json:
            self.shown.write(json.dumps(found.model_dump(mode="json"), indent=2, ensure_ascii=False) + "\n")
            return
        from memcalc.render.verification import render

        self.shown.write(render(found, self.shown.columns, self.shown.unit, unicode=self.shown.unicode))

    def _say_what_differs(self, measured: "Measured", spec: "ModelSpec") -> None:
        """The sizes of which the last step had more, or fewer, where torch could record them."""
        if measured.snapshot is None or self.shown.output is not None:
            return
        from memcalc.provenance.comparison import compare_snapshot
        from memcalc.render.snapshot_comparison import render
        from memcalc.sources.memory_snapshot import load_snapshot

        try:
            found = compare_snapshot(spec, self.setup, load_snapshot(measured.snapshot), self.gpu)
        except MemcalcError:  # of several GPUs, or with nothing in it: the counters stand
            return
        text = render(found, self.shown.columns, self.shown.unit, unicode=self.shown.unicode)
        self.shown.write("\n" + text)

    def _keep(self, measured: "Measured") -> None:
        """Keep what the machine takes beside tensors, for later estimates."""
        from memcalc.cli.files import write_whole
        from memcalc.verification.calibration import calibration_of, config_file, kept

        found = calibration_of(measured)
        if found is None:
            return
        path = config_file()
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(str(path), kept(found))
        warn("kept for later estimates on this machine: `memcalc calibration` shows it")

    def show(self, report: Report, below: str = "", drawn: "Setup | None" = None) -> None:
        """A report without operations has no phases to measure."""
        raise UsageError("verify needs a model whose operations memcalc knows; this one is counted by its weights.")


@with_job(without=("check", "markdown", "html", "svg", "snapshot"), groups=(MODEL, RUN_FILE))
def command(
    context: typer.Context,
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="What the script trains: a path, a model of the Hub (ORG/NAME), a count, or a run file. The script's "
            "command follows --.",
            show_default=False,
        ),
    ],
    *,
    options: ModelOptions,
    of_run: str | None,
    request: Request,
    steps: Annotated[
        str | None,
        typer.Option(
            "--steps",
            metavar="N",
            show_default=False,
            help="Optimizer steps to run; the last one is measured. [default: 3]",
            rich_help_panel="Run",
        ),
    ] = None,
) -> None:
    """Run your own script for a few optimizer steps and lay its real peaks beside the estimate, a line a phase.

    memcalc verify MODEL --batch 4 --seq-len 2048 -- python train.py. The script needs torch and a GPU; it is ended
    after the last step, and what it prints goes to stderr. What the machine takes beside tensors is kept for later
    estimates (memcalc calibration).
    """
    words = command_line(context)
    if not words:
        raise UsageError("verify needs the command of your script behind --: memcalc verify MODEL -- python train.py.")
    request.shown().only("verify", "json")
    if request.chosen["check"]:
        raise UsageError("verify runs the job, so there is nothing to check; leave out --check.")
    number = _STEPS if steps is None else read_count("--steps", steps)
    verifying = replace(request, kind=partial(VerifiedJob, command=tuple(words), steps=number))
    answer_for(model, verifying, options, of_run)
