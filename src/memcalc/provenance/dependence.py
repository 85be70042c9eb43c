"""Which dimensions of a tensor are the batch's and the sequence's: the step is traced with another batch and another
length, and what changes depends on them. Equal numbers (a length that is the hidden size) are told apart so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from memcalc.common.sizes import Shape
from memcalc.errors import MemcalcError
from memcalc.estimation.job import Setup
from memcalc.models.spec import ModelSpec
from memcalc.provenance.formulas import Depends
from memcalc.provenance.origins import Birth, Recording, RecordingTape
from memcalc.provenance.record import record_step
from memcalc.tables.gpus import Gpu


class Dependence:
    """What each allocation's dimensions depend on, by where it was made; nothing where that cannot be told."""

    def __init__(
        self, spec: ModelSpec, setup: Setup, seq_len: int, teacher: ModelSpec | None = None, gpu: Gpu | None = None
    ) -> None:
        self._known: dict[object, Depends] = {}
        try:
            base = list(_births(spec, setup, teacher, gpu))
        except MemcalcError:
            return
        changed = {"batch": {"batch": setup.batch * 2}}
        if seq_len > 1:
            other = seq_len // 2 if seq_len % 2 == 0 else seq_len * 2
            changed["seq_len"] = {"seq_len": other}
        runs: dict[str, list[Birth]] = {}
        for name, values in changed.items():
            try:
                run = list(_births(spec, setup.model_copy(update=values), teacher, gpu))
            except MemcalcError:  # such as positions or images that decide the length
                return
            if len(run) == len(base):
                runs[name] = run
            elif name != "batch" or setup.batch > 1:  # a batch of one is no factor
                return
        for index, key in enumerate(_keys(base)):
            found = _depends(base[index], {name: run[index] for name, run in runs.items()})
            if found is not None:
                self._known[key] = found

    def of_all(self, tape: RecordingTape) -> dict[int, Depends]:
        """What the allocations of a tape of the same job depend on, by identity."""
        births = [(allocation, birth) for allocation in tape.allocations if (birth := tape.birth(allocation))]
        keys = _keys([birth for _, birth in births])
        return {
            id(allocation): self._known[key]
            for (allocation, _), key in zip(births, keys, strict=True)
            if key in self._known
        }


def _births(spec: ModelSpec, setup: Setup, teacher: ModelSpec | None, gpu: Gpu | None) -> Iterator[Birth]:
    """The births of a run in which blocks stand for others, in order."""
    recording = Recording()
    record_step(spec, setup, recording, teacher, gpu, every_block=False)
    tape = recording.tape
    for allocation in tape.allocations:
        birth = tape.birth(allocation)
        if birth is not None:
            yield birth


def _keys(births: Sequence[Birth]) -> list[object]:
    """Where each was made, and the how manieth of its block there it was."""
    seen: Counter[object] = Counter()
    keys: list[object] = []
    for birth in births:
        origin = birth.origin
        place = (origin.module.template, origin.operation, origin.source, origin.in_backward)
        keys.append((place, seen[place, origin.module.block]))
        seen[place, origin.module.block] += 1
    return keys


def _depends(base: Birth, runs: dict[str, Birth]) -> Depends | None:
    if base.layout is None:
        return None
    shape = base.layout[0]
    others: dict[str, Shape] = {}
    for name, birth in runs.items():
        if birth.layout is None or len(birth.layout[0]) != len(shape) or birth.origin.source != base.origin.source:
            return None
        others[name] = birth.layout[0]
    return tuple(
        frozenset(name for name, other in others.items() if other[place] != size) for place, size in enumerate(shape)
    )
