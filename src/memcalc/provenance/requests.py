"""Everything that a job asks the allocator for, from loading its weights on: what an out-of-memory message can name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod

from memcalc.autograd.tape import GRADIENTS, OPTIMIZER, OVERHEAD, WEIGHTS
from memcalc.breakdown import BREAKDOWN, standing
from memcalc.common.sizes import Shape, rounded
from memcalc.nn import parameter_bytes
from memcalc.nn.module import Module, Parameter
from memcalc.provenance.formulas import Depends, Formula, Sizes, literal
from memcalc.provenance.moments import Lives, live_bytes
from memcalc.provenance.origins import NOWHERE, ModulePath, RecordingTape, parameter_paths, source_of
from memcalc.setup.setup import TrainingSetup
from memcalc.tables.engines import ENGINES
from memcalc.training.traced_step import Step

LOADING = "while the weights are loaded"
FIRST_STEP = "in the first optimizer step, which makes the states"
STEPPING = "in the optimizer's step"
OF_THE_FIRST_STEP = " of the first step, before the optimizer has states"


@dataclass(frozen=True)
class Request:
    """One allocation that a job makes: what it is, when, and the bytes of tensors that are there already.

    nbytes: bytes of the tensor, rounded to 512.
    """

    nbytes: int
    what: str
    when: str
    allocated: int
    formula: Formula
    source: str
    module: ModulePath = NOWHERE
    shape: Shape | None = None
    dtype: str | None = None


def requests(step: Step, sizes: Sizes, depends: Mapping[int, Depends] | None = None) -> Iterator[Request]:
    """All allocations of a job, as they come: loading, the first step, the optimizer's, a later step."""
    yield from _loading(step, sizes)
    states = _states(step)
    if states:
        for one in _on_tape(step, sizes, depends or {}):
            yield replace(one, when=f"{one.when}{OF_THE_FIRST_STEP}", allocated=one.allocated - states)
    if isinstance(step.setup, TrainingSetup):
        yield from _optimizer(step, sizes)
    yield from _on_tape(step, sizes, depends or {})
    if isinstance(step.setup, TrainingSetup):
        return
    if ENGINES[step.setup.engine].attention is not None:
        yield from _sampler(step)


def _states(step: Step) -> int:
    """Bytes of the optimizer's states, which the first step does not have before its end."""
    if step.optimizer is None or step.steps_in_backward:
        return 0
    return sum(nbytes for _, nbytes in BREAKDOWN[OPTIMIZER](step, "step"))


def _loading(step: Step, sizes: Sizes) -> Iterator[Request]:
    """The weights, one after another; serving engines lay some of them together."""
    paths = parameter_paths(step.network)
    before = 0
    for _, tensor in step.tensors:
        path = paths.get(id(tensor), NOWHERE)
        yield _weight(tensor, tensor.shape, path, before, sizes)
        before += parameter_bytes.nbytes(tensor)
    if not isinstance(step.setup, TrainingSetup) and ENGINES[step.setup.engine].attention is not None:
        yield from _merged(step, paths, sizes)


def _weight(tensor: Parameter, shape: Shape, path: ModulePath, before: int, sizes: Sizes) -> Request:
    return Request(
        rounded(prod(shape) * tensor.dtype.itemsize),
        "parameter",
        LOADING,
        before,
        sizes.formula(shape, tensor.dtype.itemsize, weight=True),
        source_of(BREAKDOWN[WEIGHTS]),
        path,
        shape,
        tensor.dtype.name,
    )


_MERGED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Weights that serving engines hold as one: vLLM's QKVParallelLinear and MergedColumnParallelLinear."""


def _merged(step: Step, paths: dict[int, ModulePath], sizes: Sizes) -> Iterator[Request]:
    """Weights that an engine lays together; with each how much was loaded before, block after block."""
    before: dict[int, int] = {}
    total = 0
    for _, tensor in step.tensors:
        before[id(tensor)] = total
        total += parameter_bytes.nbytes(tensor)
    for _, module in step.network.modules():
        children = dict(module.children())
        for names in _MERGED:
            weights = [_weight_of(children.get(name)) for name in names]
            known = [weight for weight in weights if weight is not None and len(weight.shape) == 2]
            if len(known) == len(names):
                first = known[0]
                shape = (sum(weight.shape[0] for weight in known), first.shape[1])
                place = paths.get(id(first), NOWHERE)
                path = ModulePath(place.template.replace(names[0], "+".join(names)), place.block)
                yield _weight(first, shape, path, before.get(id(first), 0), sizes)


def _weight_of(module: Module | None) -> Parameter | None:
    weight = getattr(module, "weight", None)
    return weight if isinstance(weight, Parameter) else None


def _on_tape(step: Step, sizes: Sizes, depends: Mapping[int, Depends]) -> Iterator[Request]:
    """What forward and backward, or prefill and decode, allocate."""
    tape = step.tape
    assert isinstance(tape, RecordingTape)
    life, live = Lives(tape), live_bytes(step)
    around = {phase: standing(step, phase) for phase in step.phases}
    for allocation in tape.allocations:
        phase = life.phase(allocation.born)
        if phase not in around:
            continue
        birth = life.birth(allocation)
        layout = birth.layout
        fits = layout is not None and rounded(prod(layout[0]) * layout[1].itemsize) == allocation.nbytes
        yield Request(
            allocation.nbytes,
            life.operation(allocation),
            f"in {phase}",
            live[allocation.born] - allocation.nbytes + around[phase],
            sizes.formula(layout[0], layout[1].itemsize, depends=depends.get(id(allocation)))
            if fits and layout
            else literal(allocation.nbytes),
            birth.origin.source,
            birth.origin.module,
            layout[0] if fits and layout else None,
            layout[1].name if fits and layout else None,
        )


def _optimizer(step: Step, sizes: Sizes) -> Iterator[Request]:
    """States as the first step makes them, and the step's own tensors, which are as large as weights."""
    if step.optimizer is None or step.engine is not None:
        return
    paths = parameter_paths(step.network)
    reached = [parameter for _, parameter in step.tensors if parameter.reached]
    there = sum(nbytes for row in (WEIGHTS, GRADIENTS, OVERHEAD) for _, nbytes in BREAKDOWN[row](step, "step"))
    whole = standing(step, "step") - step.optimizer_scratch[1]
    for parameter, weight in zip(reached, step.trained, strict=False):
        path = paths.get(id(parameter), NOWHERE)
        formula = sizes.formula(weight.shape, weight.itemsize, weight=True)
        for name, nbytes in step.optimizer.states(weight).items():
            own = formula if nbytes == weight.nbytes else literal(nbytes)
            source = source_of(step.optimizer.states)
            yield Request(nbytes, name, FIRST_STEP, there, own, source, path, weight.shape)
            there += nbytes * weight.copies
        if step.optimizer_scratch[1] >= weight.nbytes:
            what, source = step.optimizer_scratch[0], source_of(BREAKDOWN["temporary_tensors"])
            yield Request(weight.nbytes, what, STEPPING, whole, formula, source, path, weight.shape)


def _sampler(step: Step) -> Iterator[Request]:
    """What vLLM's sampler makes of the logits of all sequences: it sorts them for top-k and top-p.

    Source: vllm/v1/sample/ops/topk_topp_sampler.py: `logits.sort(dim=-1)` gives sorted logits and their indices.
    """
    head = next(
        (tensor for name, tensor in step.tensors if name.endswith(("lm_head.weight", "embed_tokens.weight"))), None
    )
    if head is None:
        return
    shape = step.setup.batch, head.shape[0]
    there = standing(step, "decode")
    for what, dtype, itemsize in (("logits", "float32", 4), ("indices of the sorted logits", "int64", 8)):
        formula = Formula(
            f"round_up(batch * vocab_size * {itemsize}, 512)", dict(zip(("batch", "vocab_size"), shape, strict=True))
        )
        yield Request(
            rounded(prod(shape) * itemsize),
            f"{what} (sort of the sampler)",
            "in the sampler, which sorts the logits of all sequences",
            there,
            formula,
            source_of(_sampler),
            shape=shape,
            dtype=dtype,
        )
