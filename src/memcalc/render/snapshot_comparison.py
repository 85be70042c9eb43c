"""A real memory snapshot beside the estimate, as text."""

from __future__ import annotations

from collections.abc import Iterator

from memcalc.provenance.comparison import PhaseComparison, SizeDifference, SnapshotComparison
from memcalc.render.terminal_text import visible, wrap
from memcalc.units import Unit, format_bytes

_SHOWN = 10


def render(found: SnapshotComparison, width: int, unit: Unit, *, unicode: bool = True) -> str:
    """The comparison in lines of at most `width` columns."""
    lines = [f"{found.model}: allocated at the peak of each phase, snapshot and estimate"]
    for phase in found.phases:
        lines += ["", *_phase(phase, unit)]
    out = []
    for line in lines:
        indent = line[: len(line) - len(line.lstrip())]
        out += [indent + text for text in wrap(line, width - len(indent))]
    return "".join(visible(line, unicode).rstrip() + "\n" for line in out)


def _phase(phase: PhaseComparison, unit: Unit) -> Iterator[str]:
    real, mine = phase.snapshot_bytes, phase.estimate_bytes
    off = (mine - real) / real if real else 0.0
    sizes = f"{format_bytes(real, unit)} in the snapshot, {format_bytes(mine, unit)} estimated"
    yield f"{phase.phase}: {sizes} ({'the same' if real == mine else f'{off:+.2%}'})"
    if not phase.differences:
        yield "  every size is there as often in both"
    for difference in phase.differences[:_SHOWN]:
        yield f"  {_difference(difference, unit)}"
    if len(phase.differences) > _SHOWN:
        yield f"  and {len(phase.differences) - _SHOWN} sizes more that differ (--json)"


def _difference(found: SizeDifference, unit: Unit) -> str:
    size = f"{format_bytes(found.bytes, unit)} ({found.bytes:,} bytes)"
    sides = [
        f"{found.in_snapshot:,} in the snapshot" + (f", of {found.snapshot_frame}" if found.snapshot_frame else ""),
        f"{found.in_estimate:,} estimated" + (f", as {found.estimate_tensor}" if found.estimate_tensor else ""),
    ]
    return f"{size}: {'; '.join(sides)}"
