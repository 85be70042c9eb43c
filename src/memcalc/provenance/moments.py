"""Moments of a step by name, and the lives of its allocations in words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby

from memcalc.autograd.spans import Span
from memcalc.autograd.tape import NEVER, Allocation
from memcalc.breakdown import standing
from memcalc.common.escaping import quoted
from memcalc.errors import UsageError, close_matches
from memcalc.peak.sweep import swept
from memcalc.provenance.origins import Birth, ModulePath, Origin, RecordingTape
from memcalc.provenance.references import Reason, References
from memcalc.report.rows import moment_text
from memcalc.training.traced_step import Step


@dataclass(frozen=True)
class Sample:
    """One moment: the sample of the tape (None in the optimizer's step), its name, and the bytes of tensors then."""

    tick: int | None
    phase: str
    text: str
    tensors: int
    is_peak: bool = True


def find_moment(step: Step, phase: str | None, at: str | None) -> Sample:
    """The peak, the peak of a phase, or the peak within the moment that `at` names. Raises UsageError for none."""
    peaks = _peaks(step)
    top = max(peaks.values(), key=lambda sample: sample.tensors)
    if phase is None and at is None:
        return top
    if at is None:
        if phase not in peaks:
            near = close_matches(str(phase), peaks) or f": choose from {', '.join(peaks)}."
            raise UsageError(f"--phase cannot be {quoted(str(phase))}{near}")
        found = peaks[phase]
    else:
        found = _named(step, at, peaks.get("step"))
    is_peak = (found.tick, found.phase) == (top.tick, top.phase)
    return replace(found, is_peak=is_peak)


def _peaks(step: Step) -> dict[str, Sample]:
    """The peak of each phase, in the order of the step."""
    _, found, _ = swept(step.tape)
    peaks = {}
    for phase in step.phases:
        live, moment = found.get(phase, (0, None))
        tick = None if moment is None else moment.tick
        peaks[phase] = Sample(tick, phase, moment_text(step, phase, moment), live + standing(step, phase))
    return peaks


def _named(step: Step, at: str, stepping: Sample | None) -> Sample:
    wanted = " ".join(at.lower().split())
    if stepping is not None and wanted in ("step", "optimizer step"):
        return stepping
    best: Sample | None = None
    live = live_bytes(step)
    around = {phase: standing(step, phase) for phase in step.phases}
    for phase in step.phases:
        ticks = [span.end - 1 for span in step.tape.spans if span.phase == phase and span.end > span.start]
        if wanted == f"end of {phase}" and ticks:
            return Sample(ticks[-1], phase, wanted, live[ticks[-1]] + around[phase])
    texts: dict[str, None] = {}
    for tick, phase, text in _texts(step):
        texts[text] = None
        if text.lower() == wanted or text.lower().startswith(f"{wanted} of "):
            total = live[tick] + around[phase]
            if best is None or total > best.tensors:
                best = Sample(tick, phase, text, total)
    if best is None:
        short = {text.rpartition(" of ")[0] if text.count(" of ") > 1 else text for text in texts}
        near = close_matches(wanted, sorted(short))
        raise UsageError(
            f"--at cannot be {quoted(at)}{near or ': moments are called as in backward of block 3, or step.'}"
        )
    return best


def live_bytes(step: Step) -> list[int]:
    """Bytes on the tape at each sample, of a step whose blocks were all traced."""
    changes = [0] * (step.tape.clock + 1)
    for allocation in step.tape.allocations:
        changes[allocation.born] += allocation.nbytes
        if allocation.dies <= step.tape.clock:
            changes[allocation.dies] -= allocation.nbytes
    return list(accumulate(changes))


def _texts(step: Step) -> Iterator[tuple[int, str, str]]:
    """Every sample with its phase and what the moment is called."""
    sweep, _, _ = swept(step.tape)
    for moment, span in sweep.moments():
        if moment.phase not in step.phases:
            continue
        if moment.block is not None:
            text = moment_text(step, moment.phase, moment)
            yield from ((tick, moment.phase, text) for tick in range(span.start, span.end))
        else:
            for tick in range(span.start, span.end):
                yield tick, moment.phase, f"{moment.phase} of {step.tape.allocations[tick].name}"


class Lives:
    """The allocations of a tape in words."""

    def __init__(self, tape: RecordingTape) -> None:
        self._tape = tape
        self._spans: list[Span] = []
        for span in tape.spans:
            self._spans += [span] * (span.end - span.start)

    def birth(self, allocation: Allocation) -> Birth:
        """The birth of an allocation."""
        return self._tape.birth(allocation) or Birth(0, Origin("", ModulePath(), "", ""), None)

    def phase(self, tick: int) -> str:
        """The phase of a sample."""
        return self._spans[tick].phase if 0 <= tick < len(self._spans) else "before the step"

    def operation(self, allocation: Allocation) -> str:
        """What made an allocation."""
        origin = self.birth(allocation).origin
        if origin.in_backward:
            plain = origin.operation.startswith(("gradient", "sum of"))
            return origin.operation if plain else f"backward of {origin.operation}"
        again = self.phase(allocation.born) == "backward" and origin.module.template
        return f"{origin.operation} (recomputed)" if again else origin.operation

    def because(self, allocation: Allocation, references: References) -> str:
        """Why an allocation is alive at the moment that was looked at."""
        birth = self.birth(allocation)
        reasons = references.reasons.get(birth.number, [])
        if not reasons:
            return f"in use by the expression that {birth.origin.source} begins"
        first, more = reasons[0], _more(reasons)
        return first.said_in(birth.origin.module.block) + more

    def until(self, allocation: Allocation) -> str:
        """When an allocation dies."""
        if allocation.dies == NEVER or allocation.dies > self._tape.clock:
            return "stays after the step" if self._tape.grad_enabled else "when the step is over"
        before = self._tape.allocations[allocation.dies - 1]
        block = self.birth(allocation).origin.module.block
        origin = self.birth(before).origin
        where = origin.module.beside(block)
        what = self.operation(before)
        phase = self.phase(allocation.dies - 1)
        when = what.replace("backward of", "the backward of", 1) if origin.in_backward else f"{what} in {phase}"
        return f"after {when}{f' ({where})' if where else ''}"

    def kind(self, allocation: Allocation, references: References) -> object:
        """Equal for allocations that are told of together: those of one operation in all blocks."""
        birth = self.birth(allocation)
        origin = birth.origin
        key = (allocation.row, allocation.name, allocation.nbytes, origin.module.template, origin.source)
        return (*key, birth.layout, self.operation(allocation), self.because(allocation, references))


def _more(reasons: Sequence[Reason]) -> str:
    """How many other operations have saved it too."""
    saved = sum(reason.text.startswith("saved by") for reason in reasons[1:])
    return "" if not saved else f", and by {saved} other operation{'s' if saved > 1 else ''}"


def module_name(paths: Sequence[ModulePath]) -> str:
    """The module of an entry: blocks that it stands for in braces, as in model.layers.{0..31}.mlp."""
    blocks = sorted({path.block for path in paths if path.block is not None})
    if not blocks:
        return paths[0].template
    return paths[0].template.replace("{}", str(blocks[0]) if len(blocks) == 1 else f"{{{_ranges(blocks)}}}")


def _ranges(numbers: Sequence[int]) -> str:
    """Whole numbers in ranges: 0..3,5."""
    out = []
    for _, run in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        found = [number for _, number in run]
        out.append(str(found[0]) if len(found) == 1 else f"{found[0]}..{found[-1]}")
    return ",".join(out)
