"""What to change so that a job fits: every remedy by itself, and the first stack of them that fits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from memcalc.decide.remedies import Remedy, remedies
from memcalc.errors import MemcalcError
from memcalc.estimation import estimate
from memcalc.models.spec import ModelSpec
from memcalc.report.schema import Report
from memcalc.setup.setup import TrainingSetup
from memcalc.tables.gpus import Gpu


@dataclass(frozen=True)
class Offer:
    """A remedy, and the bytes of the process that it saves by itself: the difference of two estimates."""

    remedy: Remedy
    saved_bytes: int
    fits: bool


@dataclass(frozen=True)
class Advice:
    """What helps a job that does not fit.

    offers: every remedy that saves something by itself, those that cost least first.
    stack: the first combination that fits, without what it does not need; empty where none does.
    process_bytes: bytes of the process with `stack`.
    """

    offers: tuple[Offer, ...]
    stack: tuple[Remedy, ...]
    process_bytes: int

    def as_options(self) -> str:
        """The stack as options of the command line, each option once."""
        merged: dict[str, object] = {}
        for remedy in self.stack:
            merged |= remedy.options
        return Remedy("", "", merged).as_options()


def advise(spec: ModelSpec, setup: TrainingSetup, gpu: Gpu, *, teacher: ModelSpec | None = None) -> Advice:
    """What would make `setup` fit `gpu`, where it does not.

    Raises MemcalcError where the job itself cannot be estimated.
    """

    def run(candidate: TrainingSetup) -> Report | None:
        try:
            return estimate(spec, candidate, gpu, teacher=teacher)
        except MemcalcError:  # a remedy that this model cannot have is none
            return None

    before = estimate(spec, setup, gpu, teacher=teacher).peak.process_bytes
    known = list(remedies(setup))
    offers = []
    for remedy in known:
        candidate = remedy.applied(setup)
        report = None if candidate is None else run(candidate)
        if report is not None and report.gpu is not None and report.peak.process_bytes < before:
            offers.append(Offer(remedy, before - report.peak.process_bytes, report.gpu.fits))
    chosen = _first_that_fits(setup, known, run)
    if chosen is None:
        return Advice(tuple(offers), (), before)
    stack, size = _without_the_idle(setup, *chosen, run)
    return Advice(tuple(offers), tuple(stack), size)


_Run = Callable[[TrainingSetup], Report | None]


def _fitting(setup: TrainingSetup, stack: list[Remedy], run: _Run) -> int | None:
    """Bytes of the process with all of `stack`; None where it does not fit."""
    for remedy in stack:
        applied = remedy.applied(setup)
        if applied is None:
            return None
        setup = applied
    report = run(setup)
    return report.peak.process_bytes if report is not None and report.gpu is not None and report.gpu.fits else None


def _first_that_fits(setup: TrainingSetup, known: list[Remedy], run: _Run) -> tuple[list[Remedy], int] | None:
    """Add remedies, those that cost least first, while each saves something, until it fits."""
    stack: list[Remedy] = []
    report = run(setup)
    size = report.peak.process_bytes if report else None
    for remedy in known:
        applied = remedy.applied(setup)
        report = None if applied is None else run(applied)
        if applied is None or report is None or size is None or report.peak.process_bytes >= size:
            continue
        stack, setup, size = [*stack, remedy], applied, report.peak.process_bytes
        if report.gpu is not None and report.gpu.fits:
            return stack, size
    return None


def _without_the_idle(setup: TrainingSetup, stack: list[Remedy], size: int, run: _Run) -> tuple[list[Remedy], int]:
    """The stack without the remedies that it fits without, the costliest tried first."""
    for remedy in reversed(stack[:-1]):
        fewer = [other for other in stack if other is not remedy]
        found = _fitting(setup, fewer, run)
        if found is not None:
            stack, size = fewer, found
    return stack, size
