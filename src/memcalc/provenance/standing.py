"""What stands around the tape at a moment, part by part, taken apart into tensors where they are known one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from memcalc.autograd.graph import AccumulateGrad
from memcalc.autograd.tape import GRADIENTS, OPTIMIZER, OVERHEAD, TEMPORARY, WEIGHTS
from memcalc.breakdown import BREAKDOWN
from memcalc.breakdown.process_memory import SEGMENT, ProcessMemory
from memcalc.common.sizes import Shape
from memcalc.nn import parameter_bytes
from memcalc.nn.module import Buffer
from memcalc.provenance.formulas import Formula, Sizes, literal
from memcalc.provenance.origins import NOWHERE, ModulePath, RecordingTape, parameter_paths, source_of
from memcalc.setup.setup import TrainingSetup
from memcalc.tables import overheads
from memcalc.training.traced_step import Step
from memcalc.training.trainer_loop import runs_trainer


@dataclass(frozen=True)
class Standing:
    """Memory that exists before the step: of one tensor and those like it, or of a part as a whole."""

    row: str
    part: str
    nbytes: int
    count: int
    formula: Formula
    what: str
    because: str
    until: str
    source: str
    module: ModulePath = NOWHERE
    shape: Shape | None = None
    dtype: str | None = None


_WHY = {
    WEIGHTS: ("part of the model", "never: it stays as long as the model"),
    OPTIMIZER: ("kept by the optimizer from step to step", "never: it stays as long as the optimizer"),
    GRADIENTS: ("gradient until the optimizer's step", "when gradients are set to None after the step"),
    TEMPORARY: ("scratch of the optimizer's step", "when the step is over"),
    OVERHEAD: ("held by the process", "when the process ends"),
}


def standing_tensors(step: Step, phase: str, sizes: Sizes) -> Iterator[Standing]:
    """What the rows hold in `phase` besides the tape: each part as its tensors, or whole where they are not known."""
    for row, parts in BREAKDOWN.items():
        for part, nbytes in _summed(parts(step, phase)).items():
            if not nbytes:
                continue
            known = list(_DETAILS[row](step, part, sizes)) if row in _DETAILS else []
            if sum(one.nbytes for one in known) == nbytes:
                yield from known
            else:
                yield _whole(row, part, nbytes)


def _summed(parts: Iterable[tuple[str, int]]) -> dict[str, int]:
    sums: dict[str, int] = {}
    for name, nbytes in parts:
        sums[name] = sums.get(name, 0) + nbytes
    return sums


def _whole(row: str, part: str, nbytes: int, formula: Formula | None = None) -> Standing:
    because, until = _WHY.get(row, ("kept from step to step", "when the step is over"))
    source = source_of(BREAKDOWN[row])
    return Standing(row, part, nbytes, 1, formula or literal(nbytes), part, because, until, source)


def _weights(step: Step, part: str, sizes: Sizes) -> Iterator[Standing]:
    paths = parameter_paths(step.network)
    for name, tensor in step.tensors:
        if parameter_bytes.label(tensor) == part:
            because, until = _WHY[WEIGHTS]
            yield Standing(
                WEIGHTS,
                part,
                parameter_bytes.nbytes(tensor),
                tensor.copies,
                sizes.formula(tensor.shape, tensor.dtype.itemsize, weight=True),
                "buffer" if isinstance(tensor, Buffer) else "parameter",
                because,
                until,
                source_of(BREAKDOWN[WEIGHTS]),
                paths.get(id(tensor), ModulePath(name)),
                tensor.shape,
                tensor.dtype.name,
            )


def _states(step: Step, part: str, sizes: Sizes) -> Iterator[Standing]:
    """The states of one kind, weight by weight; their sizes are the optimizer's own function of the weight."""
    if step.optimizer is None or step.engine is not None:
        return
    paths = parameter_paths(step.network)
    because, until = _WHY[OPTIMIZER]
    reached = [parameter for _, parameter in step.tensors if parameter.reached]
    for parameter, weight in zip(reached, step.trained, strict=False):
        each = step.optimizer.states(weight).get(part, 0)
        if not each:
            continue
        alike = [size for size in (weight.itemsize, 4, 1, 2) if weight.sized(size) == each]
        formula = sizes.formula(weight.shape, alike[0], weight=True) if alike else literal(each)
        yield Standing(
            OPTIMIZER,
            part,
            each * weight.copies,
            weight.copies,
            formula,
            part,
            because,
            until,
            source_of(step.optimizer.states),
            paths.get(id(parameter), NOWHERE),
            weight.shape if alike else None,
        )


def _gradients(step: Step, part: str, sizes: Sizes) -> Iterator[Standing]:
    if step.engine is not None:
        return
    paths = parameter_paths(step.network)
    because, until = _WHY[GRADIENTS]
    seen: set[int] = set()
    for _, parameter in step.parameters:
        if not parameter.reached:
            continue
        node = parameter.node
        allocation = node.allocation if isinstance(node, AccumulateGrad) else None
        if allocation is not None and id(allocation) in seen:
            continue
        seen.add(id(allocation))
        own = parameter_bytes.nbytes(parameter)
        each = own // parameter.copies if allocation is None else allocation.nbytes
        whole = each == own // parameter.copies
        yield Standing(
            GRADIENTS,
            part,
            each * parameter.copies,
            parameter.copies,
            sizes.formula(parameter.shape, parameter.dtype.itemsize, weight=True) if whole else literal(each),
            "gradient of a parameter",
            because,
            until,
            source_of(parameter_bytes.gradients),
            paths.get(id(parameter), NOWHERE),
            parameter.shape if whole else None,
            parameter.dtype.name,
        )


def _scratch(step: Step, part: str, sizes: Sizes) -> Iterator[Standing]:
    """The scratch of the optimizer's step, where it is a tensor like each trained weight, or a few of them."""
    name, nbytes = step.optimizer_scratch
    whole = sum(weight.nbytes * weight.copies for weight in step.trained)
    if name != part or step.engine is not None or not whole or nbytes % whole:
        return
    times, paths = nbytes // whole, parameter_paths(step.network)
    reached = [parameter for _, parameter in step.tensors if parameter.reached]
    for parameter, weight in zip(reached, step.trained, strict=False):
        because, until = _WHY[TEMPORARY]
        yield Standing(
            TEMPORARY,
            part,
            weight.nbytes * weight.copies * times,
            weight.copies * times,
            sizes.formula(weight.shape, weight.itemsize, weight=True),
            part,
            because,
            until,
            source_of(BREAKDOWN[TEMPORARY]),
            paths.get(id(parameter), NOWHERE),
            weight.shape,
        )


def _inputs(step: Step, part: str, sizes: Sizes) -> Iterator[Standing]:
    """Inputs of the step of which a view was made."""
    assert isinstance(step.tape, RecordingTape)
    for allocation in step.tape.inputs:
        layout = step.tape.inputs_layout.get(id(allocation))
        if allocation.aliased and allocation.name == part and layout is not None:
            yield Standing(
                OVERHEAD,
                part,
                allocation.nbytes,
                1,
                sizes.formula(layout[0], layout[1].itemsize),
                "input of the step",
                "the batch of the step, which the loop holds",
                "when the next batch takes its place",
                source_of(BREAKDOWN[OVERHEAD]),
                shape=layout[0],
                dtype=layout[1].name,
            )


_DETAILS: dict[str, Callable[[Step, str, Sizes], Iterator[Standing]]] = {
    WEIGHTS: _weights,
    OPTIMIZER: _states,
    GRADIENTS: _gradients,
    TEMPORARY: _scratch,
    OVERHEAD: _inputs,
}


def process_parts(step: Step, memory: ProcessMemory, sizes: Sizes) -> Iterator[Standing]:
    """What the process takes besides the tensors of the step."""
    name, nbytes, count = memory.workspaces
    source = source_of(ProcessMemory.parts)

    def whole(part: str, nbytes: int, formula: Formula | None = None) -> Standing:
        return replace(_whole(OVERHEAD, part, nbytes, formula), source=source)

    for part, total in memory.parts():
        if not total:
            continue
        if part == overheads.ALLOCATOR_RESERVE_PART and memory.counters is None:
            numbers = {"allocated": memory.allocated, "reserve": memory.reserve_fraction, "segment": SEGMENT}
            found = whole(part, total, Formula("round_up(int(allocated * reserve), segment)", numbers))
        elif part.startswith(name):
            found = replace(whole(part, total, literal(nbytes)), count=count)
        elif part == "input batch":
            found = whole(part, total, _batch(step, sizes, total))
        else:
            found = whole(part, total)
        yield found


def _batch(step: Step, sizes: Sizes, total: int) -> Formula:
    """The inputs that nobody has made a view of: of all micro-batches where the loop has them at once."""
    assert isinstance(step.tape, RecordingTape)
    setup = step.setup
    batches = setup.grad_accum if isinstance(setup, TrainingSetup) and runs_trainer(setup) else 1
    terms: list[str] = []
    numbers: dict[str, int | float] = {}
    bytes_of = 0
    for allocation in step.tape.inputs:
        layout = step.tape.inputs_layout.get(id(allocation))
        times = batches - allocation.aliased
        if layout is None or not times:
            continue
        formula = sizes.formula(layout[0], layout[1].itemsize, times=times)
        terms.append(formula.expression)
        numbers |= formula.numbers
        bytes_of += allocation.nbytes * times
    return Formula(" + ".join(terms), numbers) if terms and bytes_of == total else literal(total)
