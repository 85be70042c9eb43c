"""Which allocation of a setup was it that found no memory, when, and what makes it smaller."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import Field

from memcalc.decide.remedies import Remedy, remedies
from memcalc.errors import MemcalcError
from memcalc.estimation.job import Setup
from memcalc.models.spec import ModelSpec
from memcalc.provenance.dependence import Dependence
from memcalc.provenance.explain import process_memory, sizes_of
from memcalc.provenance.moments import module_name
from memcalc.provenance.oom_message import OutOfMemory
from memcalc.provenance.origins import Recording
from memcalc.provenance.record import record_step
from memcalc.provenance.requests import LOADING, Request, requests
from memcalc.report.contract import Contract
from memcalc.setup.setup import InferenceSetup, TrainingSetup
from memcalc.tables.gpus import Gpu

_NEAREST = 3
"""How many sizes above and below are named where none is the one."""


class Candidate(Contract):
    """Allocations of the setup that have the size of the message."""

    bytes: int = Field(description="Bytes of each, before the allocator rounds them to a segment.")
    count: int = Field(description="How many a step makes, in all blocks of the model.")
    shape: tuple[int, ...] | None = Field(description="Shape of each; null where it is no tensor of one shape.")
    dtype: str | None = Field(description="Its dtype, as torch names it; null where it is not known.")
    module: str = Field(description="Module that makes them, with {0..31} for the numbers of blocks.")
    operation: str = Field(description="What makes them.")
    when: str = Field(description="When they are made.")
    formula: str = Field(description="Bytes of one, in the model's own numbers.")
    numbers: Mapping[str, int | float] = Field(description="Values of the formula's names.")
    source: str = Field(description="File and line of memcalc's recipe that says so.")
    allocated_bytes: int = Field(
        description="What is allocated just before, as memcalc has it: of these moments the one nearest to the message."
    )
    off_bytes: int | None = Field(
        description="allocated_bytes less what the message says; null where it says nothing about it."
    )


class SmallerWith(Contract):
    """A change of options with which the likeliest candidate asks for less."""

    name: str = Field(description="What it is.")
    cost: str = Field(description="What one pays for it.")
    command_line: str = Field(description="Its options.")
    bytes: int = Field(description="What is then asked for in place of it; 0 where nothing is.")


class OomAnswer(Contract):
    """What an out-of-memory message means for a setup."""

    model: str = Field(description="Name of the model.")
    tried: str = Field(description="The size of the message, as printed.")
    message: Mapping[str, int | None] = Field(
        description="Bytes that the message says: of the GPU capacity and free, of the process, allocated and reserved."
    )
    candidates: tuple[Candidate, ...] = Field(description="What has that size, the likeliest first.")
    nearest: tuple[Candidate, ...] = Field(description="Where nothing has: the next sizes above and below.")
    smaller_with: tuple[SmallerWith, ...] = Field(description="What makes the likeliest smaller.")
    peak_allocated_bytes: int = Field(description="The peak of the setup as memcalc has it, allocated.")
    outside_bytes: int = Field(description="CUDA context and libraries, as memcalc takes them.")
    off_outside_bytes: int | None = Field(description="The same less what the message says of it.")


def explain_oom(
    spec: ModelSpec, setup: Setup, message: OutOfMemory, gpu: Gpu | None = None, teacher: ModelSpec | None = None
) -> OomAnswer:
    """The allocations of a setup that a message can mean. Raises MemcalcError where the job cannot be answered for."""
    recording = Recording()
    step = record_step(spec, setup, recording, teacher, gpu)
    depends = Dependence(spec, setup, step.seq_len, teacher, gpu).of_all(recording.tape)
    memory = process_memory(step, setup, gpu)
    extra = memory.allocated - memory.tensors  # inputs and workspaces
    known = [one for one in requests(step, sizes_of(spec, step), depends) if one.nbytes > 0]
    meant = _candidates((one for one in known if message.tried.is_printed_for(one.nbytes)), message, extra)
    meant = _expected_first(meant, _first_without_room(known, message, extra))
    near = () if meant else _nearest(known, message, extra)
    outside = memory.context + memory.nccl
    return OomAnswer(
        model=spec.name,
        tried=str(message.tried),
        message={
            "tried_bytes": message.tried.nbytes,
            "capacity_bytes": message.capacity,
            "free_bytes": message.free,
            "process_bytes": message.process,
            "allocated_bytes": message.allocated,
            "reserved_bytes": message.reserved,
        },
        candidates=meant,
        nearest=near,
        smaller_with=tuple(_smaller(spec, setup, message, teacher, meant[0])) if meant else (),
        peak_allocated_bytes=memory.allocated,
        outside_bytes=outside,
        off_outside_bytes=None if message.outside is None else outside - message.outside,
    )


def _candidates(found: Iterator[Request], message: OutOfMemory, extra: int) -> tuple[Candidate, ...]:
    """One candidate for what one operation makes in all blocks; those whose moment fits the message come first."""
    groups: dict[object, list[Request]] = {}
    for one in found:
        groups.setdefault((one.what, one.when, one.module.template, one.shape, one.dtype, one.source), []).append(one)
    made = [_candidate(some, message, extra) for some in groups.values()]
    if message.allocated is not None:
        return tuple(sorted(made, key=lambda candidate: abs(candidate.off_bytes or 0)))
    return tuple(sorted(made, key=lambda candidate: -candidate.allocated_bytes))


def _first_without_room(known: list[Request], message: OutOfMemory, extra: int) -> Request | None:
    """The first allocation for which the GPU of the message has no room; None where the message does not tell its room.

    Inputs and workspaces come with the first step.
    """
    if message.allocated is None or message.free is None:
        return None
    room = message.allocated + message.free + max((message.reserved or 0) - message.allocated, 0)
    return next(
        (one for one in known if one.allocated + (0 if one.when == LOADING else extra) + one.nbytes > room), None
    )


def _expected_first(found: tuple[Candidate, ...], expected: Request | None) -> tuple[Candidate, ...]:
    """The candidates with the one first that is where the job would fail, if it is among them."""
    return tuple(sorted(found, key=lambda one: expected is None or not _is_same(expected, one)))


def _candidate(some: list[Request], message: OutOfMemory, extra: int) -> Candidate:
    said = message.allocated
    nearest = min(some, key=lambda one: -one.allocated if said is None else abs(one.allocated + extra - said))
    return Candidate(
        bytes=nearest.nbytes,
        count=len(some),
        shape=nearest.shape,
        dtype=nearest.dtype,
        module=module_name([one.module for one in some]),
        operation=nearest.what,
        when=nearest.when,
        formula=nearest.formula.expression,
        numbers=nearest.formula.numbers,
        source=nearest.source,
        allocated_bytes=nearest.allocated + extra,
        off_bytes=None if said is None else nearest.allocated + extra - said,
    )


def _nearest(known: list[Request], message: OutOfMemory, extra: int) -> tuple[Candidate, ...]:
    """The sizes that come nearest, below and above."""
    wanted = message.tried.nbytes
    below = sorted({one.nbytes for one in known if one.nbytes < wanted})[-_NEAREST:]
    above = sorted({one.nbytes for one in known if one.nbytes > wanted})[:_NEAREST]
    sizes = sorted([*below, *above], key=lambda size: abs(size - wanted))[:_NEAREST]
    found: list[Candidate] = []
    for size in sizes:
        found += _candidates((one for one in known if one.nbytes == size), message, extra)[:1]
    return tuple(found)


def _smaller(
    spec: ModelSpec, setup: Setup, message: OutOfMemory, teacher: ModelSpec | None, meant: Candidate
) -> Iterator[SmallerWith]:
    """Changes after which the candidate asks for less, or for nothing."""
    for remedy in _remedies(setup):
        changed = _applied(remedy, setup)
        if changed is None:
            continue
        try:
            step = record_step(spec, changed, Recording(), teacher, every_block=False)
        except MemcalcError:  # a remedy that this model cannot have is none
            continue
        same = (one.nbytes for one in requests(step, sizes_of(spec, step)) if _is_same(one, meant))
        size = max(same, default=0)
        if size < meant.bytes and not message.tried.is_printed_for(size):
            yield SmallerWith(name=remedy.name, cost=remedy.cost, command_line=remedy.as_options(), bytes=size)


def _is_same(one: Request, meant: Candidate) -> bool:
    """Whether a request is the candidate's, in whatever block."""
    place = _BLOCKS.sub("{}", meant.module)
    return (one.what, one.when) == (meant.operation, meant.when) and _BLOCKS.sub("{}", str(one.module)) == place


_BLOCKS = re.compile(r"\{[0-9.,]+\}|(?<=\.)[0-9]+(?=\.|$)")
"""Numbers of blocks in a module's name, one or in braces."""


def _remedies(setup: Setup) -> Iterator[Remedy]:
    if isinstance(setup, TrainingSetup):
        yield from remedies(setup)
        if setup.grad_accum == 1 and setup.seq_len is not None and setup.seq_len > 1:
            yield Remedy("sequences half as long", "longer ones are cut", {"seq_len": setup.seq_len // 2})
        return
    if setup.batch > 1:
        yield Remedy("half the sequences at a time", "more rounds", {"batch": setup.batch // 2})
    if setup.prefill_chunk_size is None and (setup.seq_len or 0) > 1:
        yield Remedy("prefill in chunks", "more passes", {"prefill_chunk_size": max((setup.seq_len or 2) // 4, 1)})
    for form in ("fp8", "nf4"):
        yield Remedy(f"weights in {form}", "some quality", {"quantization": form})
    yield Remedy("two GPUs for every layer", "their traffic", {"tensor_parallel_size": 2})


def _applied(remedy: Remedy, setup: Setup) -> Setup | None:
    if isinstance(setup, TrainingSetup):
        return remedy.applied(setup)
    values: dict[str, Any] = {**setup.model_dump(exclude_unset=True), **remedy.options}
    if all(getattr(setup, name) == value for name, value in remedy.options.items()):
        return None
    try:
        return InferenceSetup(**values)
    except MemcalcError:
        return None
