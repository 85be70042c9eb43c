"""Which rank of a job holds most, and what each kind of rank holds."""

from __future__ import annotations

from dataclasses import replace

from memcalc.breakdown import standing
from memcalc.breakdown.temporary_tensors import LOAD
from memcalc.errors import UsageError
from memcalc.models.spec import ModelSpec
from memcalc.parallel.setup import ParallelSetup
from memcalc.peak.sweep import swept
from memcalc.setup.setup import TrainingSetup
from memcalc.training.step import trace
from memcalc.training.traced_step import Step


def phase_totals(step: Step) -> dict[str, int]:
    """Bytes of tensors at the peak of each phase."""
    _, found, _ = swept(step.tape)
    return {phase: standing(step, phase) + (found[phase][0] if phase in found else 0) for phase in step.phases}


def with_loading(step: Step) -> Step:
    """The step with a phase of its own for the loading of weights, where nothing later takes as much."""
    if not step.loading_bytes:
        return step
    loading = replace(step, phases=(LOAD, *step.phases))
    totals = phase_totals(loading)
    return loading if totals[LOAD] >= max(totals.values()) else step


def traced_ranks(
    spec: ModelSpec, setup: TrainingSetup, layout: ParallelSetup, teacher: ModelSpec | None
) -> dict[int, Step]:
    """The steps of the ranks that differ, by their place in the pipeline; a job without one has rank 0 alone.

    The first stage holds most micro-batches, the last one the logits: unless all are asked for, the others hold less.
    """
    if layout.context > 1:  # the first holds more after attention, the later ones more within it
        ranks = {0, max(layout.context - 2, 0), layout.context - 1}
        return {rank: trace(spec, setup, layout=replace(layout, context_rank=rank), teacher=teacher) for rank in ranks}
    if layout.pipeline == 1:
        return {0: trace(spec, setup, layout=layout, teacher=teacher)}
    if teacher is not None:
        raise UsageError("a pipeline is described for --objective sft only; leave out --teacher.")
    from memcalc.peak.pipeline import trace_rank  # a job without a pipeline does not pay for it

    if layout.rank is not None and setup.ranks != "all":
        return {layout.rank: trace_rank(spec, setup, layout, layout.rank)}
    everything = range(layout.pipeline)
    chosen = everything if setup.ranks == "all" else (0, layout.pipeline - 1)
    return {rank: trace_rank(spec, setup, layout, rank) for rank in chosen}
