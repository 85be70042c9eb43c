"""Which rank of a job holds most, and what each kind of rank holds."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from memcalc.breakdown import standing
from memcalc.breakdown.temporary_tensors import LOAD
from memcalc.errors import UsageError
from memcalc.models.spec import ModelSpec
from memcalc.parallel.setup import ParallelSetup
from memcalc.peak.sweep import swept
from memcalc.setup.setup import TrainingSetup
from memcalc.training.step import trace
from memcalc.training.traced_step import Step

if TYPE_CHECKING:
    from memcalc.parallel.placement import Placement


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


def cards_of(step: Step) -> dict[int, Step]:
    """The step as each GPU of its process sees it, by index; the step itself where there is one."""
    placement = step.placement
    if placement is None:
        return {0: step}
    return {card: _on_card(step, placement, card) for card in placement.cards}


def _on_card(step: Step, placement: Placement, card: int) -> Step:
    """What one GPU has of a step. Its process keeps what belongs to no layer on the first one."""
    first = card == placement.main
    cache = {name: step.cache_on_card.get(card, 0) for name in step.preallocated_cache if name == "KV cache"}
    others = {name: nbytes for name, nbytes in step.preallocated_cache.items() if name not in cache}
    own = dict(placement.weights[card]) if card in placement.weights else None
    return replace(
        step,
        tape=placement.tape_of(step.tape, card),
        tensors=tuple(placement.tensors_of(card)),
        weights=own if step.weights is not None else None,
        preallocated_cache=cache | (others if first else {}),
        cache_bytes=step.cache_on_card.get(card, 0),
        trained=tuple(weight for weight in step.trained if weight.card == card),
        update_order=tuple(weight for weight in step.update_order if weight.card == card),
        extra_weights=step.extra_weights if first else {},
        held_until_step_bytes=step.held_until_step_bytes if first else 0,
        left_by_backward=step.left_by_backward if first else 0,
    )


def traced_ranks(
    spec: ModelSpec, setup: TrainingSetup, layout: ParallelSetup, teacher: ModelSpec | None
) -> dict[int, Step]:
    """The steps of the ranks that differ, by their place in the pipeline; a job without one has rank 0 alone.

    The first stage holds most micro-batches, the last one the logits: unless all are asked for, the others hold less.
    """
    if layout.context > 1 and not layout.ulysses:  # the first holds more after attention, the later ones more within it
        ranks = {0, max(layout.context - 2, 0), layout.context - 1}
        return {rank: trace(spec, setup, layout=replace(layout, context_rank=rank), teacher=teacher) for rank in ranks}
    if layout.device_map is not None:
        return cards_of(trace(spec, setup, layout=layout, teacher=teacher))
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
