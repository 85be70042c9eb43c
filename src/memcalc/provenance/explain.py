"""`explain`: the tensors that are alive at a moment of a step, the largest first, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from math import prod

from memcalc.autograd.tape import ROWS, Allocation
from memcalc.breakdown.process_memory import ProcessMemory
from memcalc.common.assumption import Assumption
from memcalc.common.sizes import rounded
from memcalc.estimation.estimate import estimate
from memcalc.estimation.job import Job, Setup
from memcalc.estimation.process import process_memory_of
from memcalc.models.registry import family
from memcalc.models.spec import ModelSpec
from memcalc.parallel.layout import layout_of
from memcalc.parallel.setup import SINGLE
from memcalc.provenance.dependence import Dependence
from memcalc.provenance.explanation import Explanation, TensorEntry
from memcalc.provenance.formulas import Depends, Sizes, literal
from memcalc.provenance.moments import Lives, Sample, find_moment, module_name
from memcalc.provenance.origins import Looked, Recording, RecordingTape
from memcalc.provenance.record import record_step
from memcalc.provenance.references import References
from memcalc.provenance.standing import Standing, process_parts, standing_tensors
from memcalc.report.cluster import communicators
from memcalc.setup.setup import TrainingSetup
from memcalc.tables.gpus import Gpu
from memcalc.timeline import of_one_micro_batch
from memcalc.training.traced_step import Step


def explain(  # noqa: PLR0913 (what estimate takes, and the moment)
    spec: ModelSpec,
    setup: Setup,
    gpu: Gpu | None = None,
    *,
    phase: str | None = None,
    at: str | None = None,
    assumptions: Sequence[Assumption] = (),
    teacher: ModelSpec | None = None,
) -> Explanation:
    """What is alive at the peak, at the peak of a `phase`, or `at` a moment such as "backward of block 3".

    The entries sum to the box, exactly: at the peak to the report's peak.process_bytes.

    Raises:
        MemcalcError: the job cannot be answered for, or has no such moment.
    """
    report = estimate(spec, setup, gpu, assumptions=(*assumptions, *of_one_micro_batch(setup)), teacher=teacher)
    recording = Recording()
    step = record_step(spec, setup, recording, teacher, gpu)
    sample = find_moment(step, phase, at)
    memory = process_memory(step, setup, gpu, spec)
    sizes = sizes_of(spec, step)
    around = [*standing_tensors(step, sample.phase, sizes), *process_parts(step, memory, sizes)]
    entries = [
        *_standing_entries(around),
        *_tape_entries(
            step,
            sample.tick,
            _references(spec, setup, teacher, gpu, recording, sample),
            sizes,
            Dependence(spec, setup, step.seq_len, teacher, gpu).of_all(recording.tape),
        ),
    ]
    entries.sort(key=lambda entry: -entry.bytes)
    rows = {row: sum(entry.bytes for entry in entries if entry.row == row) for row in ROWS}
    return Explanation(
        model=spec.name,
        phase=sample.phase,
        moment=sample.text,
        is_peak=sample.is_peak,
        total_bytes=sum(rows.values()),
        rows=rows,
        tensors=tuple(entries),
        left_out_bytes=0,
        assumptions=report.assumptions,
    )


def process_memory(step: Step, setup: Setup, gpu: Gpu | None, spec: ModelSpec | None = None) -> ProcessMemory:
    """What the process takes besides tensors, at the peak of a recorded step; with a `spec` as its allocator has it."""
    peak = find_moment(step, None, None)
    layout = layout_of(setup, {}) if isinstance(setup, TrainingSetup) else SINGLE
    if spec is None:
        return ProcessMemory.for_job(step.input_bytes, setup, gpu, peak.tensors, communicators(layout))
    return process_memory_of(Job(spec, setup, gpu), step, peak.tensors, layout)


def sizes_of(spec: ModelSpec, step: Step) -> Sizes:
    """The numbers that formulas are made of."""
    lengths = {"batch": step.setup.batch, "seq_len": step.seq_len}
    if step.target_len is not None:
        lengths["target_len"] = step.target_len
    if not isinstance(step.setup, TrainingSetup) and step.setup.num_beams > 1:
        lengths["beams"] = step.setup.num_beams
    return Sizes(lengths, {**family(spec.model_type).defaults, **spec.config})


def _references(
    spec: ModelSpec, setup: Setup, teacher: ModelSpec | None, gpu: Gpu | None, recording: Recording, sample: Sample
) -> References:
    """Run once more, up to the moment, and look at what refers to what."""
    found = References()
    birth = None if sample.tick is None else recording.tape.birth(recording.tape.allocations[sample.tick])
    if birth is None:
        return found
    again = Recording(lambda tape: found.look(tape, again.networks), birth.number, len(recording.tapes))
    with suppress(Looked):
        record_step(spec, setup, again, teacher, gpu)
    return found


def _standing_entries(around: Sequence[Standing]) -> Iterator[TensorEntry]:
    """One entry for each weight of a block in all blocks of the stack."""
    groups: dict[object, list[Standing]] = {}
    for one in around:
        alike = (one.row, one.part, one.module.template, one.formula.expression, one.shape, one.dtype, one.what)
        groups.setdefault(alike, []).append(one)
    for some in groups.values():
        first = some[0]
        yield TensorEntry(
            row=first.row,
            part=first.part,
            bytes=sum(one.nbytes for one in some),
            count=sum(one.count for one in some),
            shape=first.shape,
            dtype=first.dtype,
            module=module_name([one.module for one in some]),
            operation=first.what,
            made_in="before the step",
            alive_because=first.because,
            until=first.until,
            formula=first.formula.expression,
            numbers=first.formula.numbers,
            source=first.source,
        )


def _tape_entries(
    step: Step, tick: int | None, references: References, sizes: Sizes, depends: Mapping[int, Depends]
) -> Iterator[TensorEntry]:
    """One entry for what one operation of a module made, in all blocks of the stack."""
    tape = step.tape
    assert isinstance(tape, RecordingTape)
    if tick is None:
        return
    life = Lives(tape)
    groups: dict[object, list[Allocation]] = {}
    for allocation in tape.allocations:
        if allocation.born <= tick < allocation.dies and allocation.nbytes:
            groups.setdefault(life.kind(allocation, references), []).append(allocation)
    for some in groups.values():
        yield _entry(life, some, references, sizes, depends.get(id(some[0])))


def _entry(
    life: Lives, some: Sequence[Allocation], references: References, sizes: Sizes, depends: Depends | None
) -> TensorEntry:
    first = some[0]
    birth = life.birth(first)
    layout = birth.layout or references.layouts.get(birth.number)
    depends = depends if birth.layout is not None else None
    one = 0 if layout is None else rounded(prod(layout[0]) * layout[1].itemsize)
    if layout is None or not one or first.nbytes % one:
        layout, formula = None, literal(first.nbytes)
    else:  # a loop over tokens is traced for one token
        formula = sizes.formula(layout[0], layout[1].itemsize, times=first.nbytes // one, depends=depends)
    return TensorEntry(
        row=first.row,
        part=first.name,
        bytes=sum(allocation.nbytes for allocation in some),
        count=len(some),
        shape=None if layout is None else layout[0],
        dtype=None if layout is None else layout[1].name,
        module=module_name([life.birth(allocation).origin.module for allocation in some]),
        operation=life.operation(first),
        made_in=life.phase(first.born),
        alive_because=life.because(first, references),
        until=Counter(map(life.until, some)).most_common(1)[0][0],
        formula=formula.expression,
        numbers=formula.numbers,
        source=birth.origin.source,
    )
