"""`trace`: the tape of a step itself, one line an allocation."""

from __future__ import annotations

from dataclasses import dataclass

from memcalc.autograd.tape import NEVER
from memcalc.breakdown import standing
from memcalc.common.escaping import quoted
from memcalc.errors import UsageError, close_matches
from memcalc.estimation.job import Setup
from memcalc.models.spec import ModelSpec
from memcalc.provenance.moments import Lives, find_moment, live_bytes
from memcalc.provenance.origins import Recording
from memcalc.provenance.record import record_step


@dataclass(frozen=True)
class TapeLine:
    """One allocation.

    tick: the sample at which it is born; the tape's clock counts allocations.
    dies: the first sample at which it is gone; None where it outlives the step.
    bytes: its size, rounded to 512; negative where memory that stood before was freed.
    live_bytes: all tensors at this sample, those included that stand beside the tape.
    row, part: where the box shows it.
    block: the block of the model that ran; empty between blocks.
    operation, module: what made it.
    is_peak: most of this phase is alive at this sample.
    """

    tick: int
    dies: int | None
    bytes: int
    live_bytes: int
    phase: str
    row: str
    part: str
    block: str
    operation: str
    module: str
    is_peak: bool


def listing(
    spec: ModelSpec,
    setup: Setup,
    *,
    phase: str | None = None,
    around_peak: int | None = None,
    teacher: ModelSpec | None = None,
) -> list[TapeLine]:
    """The tape of a step in which every block was traced, so that bytes sum to the peak.

    Args:
        spec: the model.
        setup: what is run.
        phase: only this phase; None is all.
        around_peak: only so many samples on either side of the peak (of the phase, where there is one).
        teacher: the model that distillation asks.

    Raises:
        MemcalcError: the job cannot be answered for, or its tape has no such phase.
    """
    recording = Recording()
    step = record_step(spec, setup, recording, teacher)
    tape, live = recording.tape, live_bytes(step)
    lives, peaks = Lives(tape), {}
    traced = list(dict.fromkeys(span.phase for span in tape.spans if span.end > span.start))
    if phase is not None and phase not in traced:
        near = close_matches(phase, traced) or f": choose from {', '.join(traced)}."
        raise UsageError(f"--phase cannot be {quoted(phase)}, as nothing is allocated there{near}")
    for name in step.phases:
        peaks[name] = find_moment(step, name, None)
    top = max((peak for peak in peaks.values() if peak.tick is not None), key=lambda peak: peak.tensors)
    middle = (top if phase is None else peaks[phase]).tick or 0
    beside = {name: standing(step, name) for name in step.phases}
    blocks = [""] * tape.clock
    for span in tape.spans:
        if span.block is not None:
            name = f"{span.block.stack} {span.block.position + 1} of {span.block.depth}"
            blocks[span.start : span.end] = [name] * (span.end - span.start)
    found = []
    for allocation in tape.allocations:
        tick, at = allocation.born, lives.phase(allocation.born)
        if (phase is None or at == phase) and (around_peak is None or abs(tick - middle) <= around_peak):
            line = TapeLine(
                tick,
                None if allocation.dies == NEVER else allocation.dies,
                allocation.nbytes,
                live[tick] + beside.get(at, 0),
                at,
                allocation.row,
                allocation.name,
                blocks[tick],
                lives.operation(allocation),
                str(lives.birth(allocation).origin.module),
                at in peaks and peaks[at].tick == tick,
            )
            found.append(line)
    return found
