"""The memory of a traced step at every tick, of every block of the model."""

from unittest.mock import patch

from memcalc.autograd.tape import ROWS
from memcalc.inference.generate import generate
from memcalc.models.spec import ModelSpec
from memcalc.nn import stack
from memcalc.peak.sweep import Sweep
from memcalc.peak.timeline import runs_of
from memcalc.setup.setup import InferenceSetup, TrainingSetup
from memcalc.training import step as training_step
from memcalc.training.step import trace
from memcalc.training.traced_step import Step
from support.every_block import every_block

Ticks = list[tuple[str, tuple[int, ...]]]


def traced(spec: ModelSpec, setup: TrainingSetup | InferenceSetup, *, whole: bool = False) -> Step:
    """The step of a job; `whole`: with every block traced."""
    training_step._trace.cache_clear()
    try:
        with patch.object(stack, "_representatives", every_block if whole else stack._representatives):
            return trace(spec, setup) if isinstance(setup, TrainingSetup) else generate(spec, setup)
    finally:
        training_step._trace.cache_clear()


def ticks(step: Step) -> Ticks:
    """Phase and bytes of every row at each tick: repeated blocks written out one by one."""
    return [
        (run.phase, run.rows_at(block, tick))
        for run in runs_of(Sweep(step.tape))
        for block in range(run.count)
        for tick in range(len(run.totals))
    ]


def counted(step: Step) -> Ticks:
    """The same of a step with every block traced, counted from its allocations alone."""
    alive = [[0] * len(ROWS) for _ in range(step.tape.clock + 1)]
    for allocation in step.tape.allocations:
        for tick in range(allocation.born, min(allocation.dies, step.tape.clock)):
            alive[tick][ROWS.index(allocation.row)] += allocation.nbytes
    return [(span.phase, tuple(alive[tick])) for span in step.tape.spans for tick in range(span.start, span.end)]
