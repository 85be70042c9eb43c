"""One rank of a pipeline: a micro-batch of each of its stages is traced, and the schedule says how many are alive.

A micro-batch takes what its tape shows; others in flight keep what is alive between its forward and its backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

from memcalc.autograd.tape import Tape
from memcalc.common.sizes import rounded
from memcalc.models.spec import ModelSpec
from memcalc.optim.weight import SCALAR
from memcalc.parallel.engine import Engine, Job, Part
from memcalc.parallel.pipeline_stage import PipelineStage, Stage
from memcalc.parallel.schedules import actions
from memcalc.parallel.setup import ParallelSetup
from memcalc.peak.sweep import Sweep, swept
from memcalc.setup.setup import TrainingSetup
from memcalc.tables.dtypes import INT64, DType
from memcalc.training.step import trace
from memcalc.training.traced_step import PLAIN, Step, Tracing

IN_FLIGHT = "activations of micro-batches in flight"
RECEIVED = "receive buffers (pipeline)"
LOGITS = "logits of all micro-batches"


class TracedStage:
    """A stage with two micro-batches of it: the first, whose backward makes gradients, and a later one."""

    def __init__(self, first: Step, later: Step, layout: ParallelSetup) -> None:
        self.steps = (first, later)
        network = first.network
        assert isinstance(network, Stage)
        assert isinstance(first.setup, TrainingSetup)
        found = [swept(step.tape) for step in self.steps]
        sweeps, peaks = [one[0] for one in found], [one[1] for one in found]
        self.forward = peaks[0]["forward"][0]
        self.backward = tuple(found["backward"][0] for found in peaks)
        self.left = _after_forward(sweeps[0], first.tape)
        self.gradients = sum(nbytes for _, nbytes in _engine(first).gradients("step"))
        boundary = network.boundary(first.setup.batch, first.seq_len)
        self.boundary = rounded(prod(boundary) * first.engine.job.compute.itemsize) if first.engine else 0
        ends = (not network.first) + (not network.last)
        self.forgets = network.sends_and_forgets
        self.buffers = 0 if self.forgets else ends * layout.microbatches * self.boundary
        self.casts = cast_bytes(first.tape)
        self.logits = 0
        if isinstance(network, PipelineStage) and network.last and layout.keep_outputs:
            width = network.lm_head.weight.shape[0]
            self.logits = rounded(first.setup.batch * first.seq_len * width * _logits_dtype(first).itemsize)
        self.is_first, self.is_last = network.first, network.last


def _engine(step: Step) -> Engine:
    assert step.engine is not None
    return step.engine


def _logits_dtype(step: Step) -> DType:
    return step.tape.last_autocast or _engine(step).job.compute


def _after_forward(sweep: Sweep, tape: Tape) -> int:
    """Bytes alive when a micro-batch has run forward and not yet backward."""
    for moment, span in sweep.moments():
        if moment.phase == "backward" and span.end > span.start:
            live = sum(sweep.live_at(replace(moment, tick=span.start)).values())
            return live - tape.allocations[span.start].nbytes
    return 0


def cast_bytes(tape: Tape) -> int:
    """Bytes of the weights' 16-bit copies that autocast keeps through the whole step."""
    return tape.standing_casts


@dataclass(frozen=True)
class Worst:
    """The most that a kind of action has alive, and at which of them."""

    nbytes: int = -1
    stage: int = 0
    later: int = 0
    gradients: int = 0
    others: int = 0


class PipelineRank(Engine):
    """All stages of a rank: what stands while one micro-batch of one of them runs."""

    def __init__(self, job: Job, stages: Sequence[TracedStage], worst: dict[str, Worst], ids: int) -> None:
        super().__init__(job)
        self.stages, self.worst, self.ids = stages, worst, ids
        self.engines = [_engine(stage.steps[0]) for stage in stages]

    def _all(self, parts: Iterable[Iterable[Part]]) -> Iterator[Part]:
        sizes: dict[str, int] = {}
        for name, nbytes in (part for some in parts for part in some):
            sizes[name] = sizes.get(name, 0) + nbytes
        yield from sizes.items()

    def weights(self) -> Iterator[Part]:
        """The weights of all stages."""
        yield from self._all(engine.weights() for engine in self.engines)

    def states(self) -> Iterator[Part]:
        """What stands beside the optimizer's states."""
        yield from self._all(engine.states() for engine in self.engines)

    def gradients(self, phase: str, scratch: int = 0) -> Iterator[Part]:
        """Gradients stand from the first backward of a stage on."""
        if phase in self.worst:
            yield self.engines[0].STANDING, self.worst[phase].gradients
        else:
            yield from self._all(engine.gradients(phase, scratch) for engine in self.engines)

    def buffers(self, phase: str) -> Iterator[Part]:
        """Receive buffers of all micro-batches, what others in flight keep, and the last stage's logits."""
        received = sum(stage.buffers for stage in self.stages)
        worst = self.stages[self.worst[phase].stage] if phase in self.worst else self.stages[0]
        if phase == "backward" and not worst.is_last and not worst.forgets:
            received -= worst.boundary  # which the tape has as its root gradient
        yield RECEIVED, received
        if self.ids:
            yield "token ids and labels of other micro-batches", self.ids
        if phase in self.worst:
            yield IN_FLIGHT, self.worst[phase].others
            yield "16-bit copies for matmuls", sum(stage.casts for stage in self.stages)
        else:
            yield LOGITS, sum(stage.logits for stage in self.stages) * self.layout.microbatches

    def temporaries(self, phase: str, step: Part) -> Iterator[Part]:
        """As the stages' own engine has it."""
        yield from self.engines[0].temporaries(phase, step)


def trace_rank(
    spec: ModelSpec,
    setup: TrainingSetup,
    layout: ParallelSetup,
    rank: int,
    *,
    tracing: Tracing = PLAIN,
    again: Callable[[TrainingSetup, ParallelSetup], Step] | None = None,
) -> Step:
    """The step of one rank of a pipeline: that of the stage and micro-batch at which most is alive.

    `again` traces that one once more, where somebody wants to be told of its tensors.
    """
    stages = []
    held = {"keep_logits": True}  # a stage's output stays with its micro-batch
    for index in range(rank, layout.pipeline * layout.virtual, layout.pipeline):
        own = replace(layout, stage=index, rank=rank)
        pair = [
            trace(spec, setup.model_copy(update=held | {"grad_accum": accum}), layout=own, tracing=tracing)
            for accum in (1, 2)
        ]
        stages.append(TracedStage(pair[0], pair[1], layout))
    worst = _run(stages, layout, rank, accumulated=setup.grad_accum > 1)
    top = worst[max(worst, key=lambda phase: worst[phase].nbytes)]
    chosen = stages[top.stage].steps[top.later]
    if again is not None:
        own = replace(layout, stage=rank + top.stage * layout.pipeline, rank=rank)
        chosen = again(setup.model_copy(update=held | {"grad_accum": 1 + top.later}), own)
    job = _engine(chosen).job
    ends = sum(stage.is_first + stage.is_last for stage in stages)
    ids = ends * (layout.microbatches - 1) * rounded(setup.batch * chosen.seq_len * INT64.itemsize)
    return replace(
        chosen,
        setup=setup,
        engine=PipelineRank(job, stages, worst, ids),
        trained=tuple(weight for stage in stages for weight in stage.steps[0].trained),
        update_order=tuple(weight for stage in stages for weight in stage.steps[0].update_order),
        tensors=tuple(tensor for stage in stages for tensor in stage.steps[0].tensors),
    )


def _run(stages: Sequence[TracedStage], layout: ParallelSetup, rank: int, *, accumulated: bool) -> dict[str, Worst]:
    """Run the schedule: the worst moment of every phase, with what stands then besides the micro-batch's own tape."""
    made = [stage.gradients if accumulated else 0 for stage in stages]
    kept = sent = 0  # `sent`: the gradient that the schedule's last send still refers to
    worst = {"forward": Worst(), "backward": Worst()}
    for action in actions(layout, rank):
        stage = stages[action.stage]
        later = int(made[action.stage] > 0)
        if action.forward:
            inside, others, phase = stage.forward, kept + sent, "forward"
            kept += stage.left
        else:
            inside, others, phase = stage.backward[later], kept - stage.left + sent, "backward"
            kept -= stage.left - stage.logits - (SCALAR if stage.is_last else 0)
        total = inside + others + sum(made)
        if total > worst[phase].nbytes:
            worst[phase] = Worst(total, action.stage, later, sum(made), others)
        if not action.forward:
            made[action.stage] = stage.gradients
            sent = stage.boundary if layout.schedule == "1f1b" and not stage.is_first else 0
    logits = sum(stage.logits for stage in stages) * layout.microbatches
    if logits:  # at the end they are put together once more
        total = kept + logits + sum(made)
        if total > worst["backward"].nbytes:
            last = len(stages) - 1
            tape = stages[last].backward[1]
            worst["backward"] = Worst(total, last, 1, sum(made), total - sum(made) - tape)
    return worst
