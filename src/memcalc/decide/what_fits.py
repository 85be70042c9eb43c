"""What to change so that a job fits: every remedy by itself, and the first stack of them that fits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from memcalc.decide.largest import fewest_gpus, sharding
from memcalc.decide.remedies import Remedy, remedies
from memcalc.errors import MemcalcError
from memcalc.estimation.process import process_bytes, usable_bytes
from memcalc.models.spec import ModelSpec
from memcalc.report.gpu_schema import Remedies, RemedyOffer
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
    fewest_gpus: how many GPUs have to share the job as it is; None where no number is enough.
    sharding: the engine by which they would share it.
    """

    offers: tuple[Offer, ...]
    stack: tuple[Remedy, ...]
    process_bytes: int
    fewest_gpus: int | None
    sharding: str

    @property
    def together(self) -> Remedy:
        """The stack as one remedy, each option once."""
        options = {name: value for remedy in self.stack for name, value in remedy.options.items()}
        keys = ", ".join(dict.fromkeys(remedy.keys for remedy in self.stack))
        return Remedy(" and ".join(remedy.name for remedy in self.stack), "", options, keys=keys)

    def reported(self) -> Remedies:
        """As the JSON of a report has it."""
        offers = [
            RemedyOffer(
                name=offer.remedy.name,
                cost=offer.remedy.cost,
                options=dict(offer.remedy.options),
                change=offer.remedy.as_options(),
                saved_bytes=offer.saved_bytes,
                fits=offer.fits,
            )
            for offer in self.offers
        ]
        return Remedies(
            alone=tuple(offers),
            together=dict(self.together.options) if self.stack else None,
            change=self.together.as_options() if self.stack else None,
            process_bytes=self.process_bytes if self.stack else None,
            fewest_gpus=self.fewest_gpus,
        )


def advise(
    spec: ModelSpec,
    setup: TrainingSetup,
    gpu: Gpu,
    *,
    teacher: ModelSpec | None = None,
    known: Sequence[Remedy] | None = None,
) -> Advice:
    """What would make `setup` fit `gpu`, where it does not.

    Args:
        spec: the model.
        setup: what is run.
        gpu: what it has to fit.
        teacher: the model that distillation asks.
        known: the remedies that there are, those that cost least first; None: memcalc's own.

    Raises:
        MemcalcError: the job itself cannot be estimated.
    """

    asked: dict[tuple[TrainingSetup, frozenset[str]], int | None] = {}

    def run(candidate: TrainingSetup) -> int | None:
        key = (candidate, frozenset(candidate.model_fields_set))
        if key not in asked:  # a remedy alone is also the first of a stack
            try:
                asked[key] = process_bytes(spec, candidate, gpu, teacher)
            except MemcalcError:  # a remedy that this model cannot have is none
                asked[key] = None
        return asked[key]

    before = process_bytes(spec, setup, gpu, teacher)
    room = usable_bytes(setup, gpu)
    known = list(remedies(setup)) if known is None else known
    offers = []
    for remedy in known:
        candidate = remedy.applied(setup)
        size = None if candidate is None else run(candidate)
        if size is not None and size < before:
            offers.append(Offer(remedy, before - size, size <= room))
    stack, size = _first_that_fits(setup, known, room, run) if before > room else ([], before)
    stack, size = _without_the_idle(setup, stack, size, room, run)
    gpus = fewest_gpus(spec, setup, gpu, teacher=teacher)
    return Advice(tuple(offers), tuple(stack), size, gpus, sharding(setup))


_Run = Callable[[TrainingSetup], int | None]


def _fitting(setup: TrainingSetup, stack: list[Remedy], room: int, run: _Run) -> int | None:
    """Bytes of the process with all of `stack`; None where it does not fit."""
    for remedy in stack:
        applied = remedy.applied(setup)
        if applied is None:
            return None
        setup = applied
    size = run(setup)
    return size if size is not None and size <= room else None


def _first_that_fits(setup: TrainingSetup, known: Sequence[Remedy], room: int, run: _Run) -> tuple[list[Remedy], int]:
    """Remedies, those that cost least first, while each saves something, until it fits; none where it never does."""
    stack: list[Remedy] = []
    before = least = run(setup) or 0
    for remedy in known:
        applied = remedy.applied(setup)
        size = None if applied is None else run(applied)
        if applied is None or size is None or size >= least:
            continue
        stack, setup, least = [*stack, remedy], applied, size
        if size <= room:
            return stack, size
    return [], before


def _without_the_idle(
    setup: TrainingSetup, stack: list[Remedy], size: int, room: int, run: _Run
) -> tuple[list[Remedy], int]:
    """The stack without the remedies that it fits without, the costliest tried first."""
    for remedy in reversed(stack[:-1]):
        fewer = [other for other in stack if other is not remedy]
        found = _fitting(setup, fewer, room, run)
        if found is not None:
            stack, size = fewer, found
    return stack, size
