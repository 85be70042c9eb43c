"""A real memory snapshot beside the estimate: the peak of each phase, and the sizes that one has and the other not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from pydantic import Field

from memcalc.errors import UsageError
from memcalc.estimation.job import Setup
from memcalc.models.spec import ModelSpec
from memcalc.provenance.explain import process_memory
from memcalc.provenance.formulas import Sizes
from memcalc.provenance.moments import Lives, Sample, find_moment
from memcalc.provenance.origins import Recording, RecordingTape
from memcalc.provenance.real_snapshot import WHOLE, RealPhase, real_phases
from memcalc.provenance.record import record_step
from memcalc.provenance.snapshot import OUTSIDE
from memcalc.provenance.standing import Standing, process_parts, standing_tensors
from memcalc.report.contract import Contract
from memcalc.tables.gpus import Gpu
from memcalc.training.traced_step import Step


class SizeDifference(Contract):
    """A size of which there are more in the one than in the other."""

    bytes: int = Field(description="Bytes of each.")
    in_snapshot: int = Field(description="How many the snapshot has at the peak of the phase.")
    in_estimate: int = Field(description="How many the estimate has.")
    snapshot_frame: str = Field(description="Where the snapshot says that one was made; empty where it does not say.")
    estimate_tensor: str = Field(description="What memcalc calls one; empty where it has none.")


class PhaseComparison(Contract):
    """The peak of a phase."""

    phase: str = Field(description="The phase; 'whole' where the snapshot does not tell phases apart.")
    snapshot_bytes: int = Field(
        description="Bytes allocated at the peak of the phase in the snapshot, each rounded to 512."
    )
    estimate_bytes: int = Field(description="The same in the estimate.")
    differences: tuple[SizeDifference, ...] = Field(description="Sizes that differ, the largest bytes first.")


class SnapshotComparison(Contract):
    """A real memory snapshot beside the estimate of a setup."""

    model: str = Field(description="Name of the model.")
    phases: tuple[PhaseComparison, ...] = Field(description="The phases that the snapshot tells, in order.")


def compare_snapshot(spec: ModelSpec, setup: Setup, found: Any, gpu: Gpu | None = None) -> SnapshotComparison:
    """Lay a snapshot (plain containers) beside a job. Raises MemcalcError where it is none, or no job on one GPU."""
    real = real_phases(found)
    step = record_step(spec, setup, Recording(), gpu=gpu)
    if step.engine is not None:
        raise UsageError("a memory snapshot is of one GPU; leave out the options of several.")
    phases = []
    for name in sorted(real, key=lambda name: (*step.phases, name).index(name) if name in step.phases else -1):
        sample = find_moment(step, None if name == WHOLE or name not in step.phases else name, None)
        phases.append(_compared(name, real[name], _alive(step, sample, setup, gpu)))
    return SnapshotComparison(model=spec.name, phases=tuple(phases))


def _compared(name: str, real: RealPhase, alive: Iterator[tuple[int, str]]) -> PhaseComparison:
    sizes, names = Counter[int](), dict[int, str]()
    for nbytes, what in alive:
        sizes[nbytes] += 1
        names.setdefault(nbytes, what)
    different = [nbytes for nbytes in sizes.keys() | real.sizes.keys() if sizes[nbytes] != real.sizes[nbytes]]
    different.sort(key=lambda nbytes: -nbytes * abs(sizes[nbytes] - real.sizes[nbytes]))
    return PhaseComparison(
        phase=name,
        snapshot_bytes=real.peak_bytes,
        estimate_bytes=sum(nbytes * count for nbytes, count in sizes.items()),
        differences=tuple(
            SizeDifference(
                bytes=nbytes,
                in_snapshot=real.sizes[nbytes],
                in_estimate=sizes[nbytes],
                snapshot_frame=real.makers.get(nbytes, ""),
                estimate_tensor=names.get(nbytes, ""),
            )
            for nbytes in different
        ),
    )


def _alive(step: Step, sample: Sample, setup: Setup, gpu: Gpu | None) -> Iterator[tuple[int, str]]:
    """Bytes and name of each piece that PyTorch's allocator holds at a moment of the estimate."""
    tape = step.tape
    assert isinstance(tape, RecordingTape)
    sizes, life = Sizes({}, {}), Lives(tape)  # nobody reads the formulas
    parts = [*standing_tensors(step, sample.phase, sizes)]
    parts += [part for part in process_parts(step, process_memory(step, setup, gpu), sizes) if part.part not in OUTSIDE]
    for part in parts:
        for _ in range(part.count):
            yield part.nbytes // part.count, _said(part)
    if sample.tick is not None:
        for allocation in tape.allocations:
            if allocation.born <= sample.tick < allocation.dies and allocation.nbytes > 0:
                origin = life.birth(allocation).origin
                where = f" of {origin.module}" if origin.module.template else ""
                yield allocation.nbytes, f"{life.operation(allocation)}{where}"


def _said(part: Standing) -> str:
    return f"{part.what} {part.module}" if part.module.template else part.what
