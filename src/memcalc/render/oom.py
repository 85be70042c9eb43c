"""`explain --oom` as text: which allocation it was, when, how far the estimate is off, and what makes it smaller."""

from __future__ import annotations

from collections.abc import Iterator

from memcalc.provenance.oom import Candidate, OomAnswer
from memcalc.render.explanation import layout, worked_out
from memcalc.render.terminal_text import visible, wrap
from memcalc.units import Unit, format_bytes

_SHOWN = 8
_INDENT = "  "


def render(found: OomAnswer, width: int, unit: Unit, *, unicode: bool = True) -> str:
    """The answer in lines of at most `width` columns."""
    lines = [line for text in _lines(found, unit) for line in _wrapped(text, width)]
    return "".join(visible(line, unicode).rstrip() + "\n" for line in lines)


def _wrapped(text: str, width: int) -> list[str]:
    indent = text[: len(text) - len(text.lstrip())]
    return [indent + line for line in wrap(text, width - len(indent))]


def _lines(found: OomAnswer, unit: Unit) -> Iterator[str]:
    if found.candidates:
        yield f"{found.model}: {found.tried} is, in this setup, the likeliest first:"
    else:
        yield f"{found.model}: nothing in this setup asks for {found.tried}; its setup was another. Nearest are:"
    for candidate in (found.candidates or found.nearest)[:_SHOWN]:
        yield ""
        yield from _candidate(candidate, unit)
    if len(found.candidates) > _SHOWN:
        yield ""
        yield f"and {len(found.candidates) - _SHOWN} more (--json)"
    if found.candidates:
        yield ""
        yield from _smaller(found, unit)
    yield ""
    yield from _compared(found, unit)


def _candidate(candidate: Candidate, unit: Unit) -> Iterator[str]:
    made = f"{candidate.module} · {candidate.operation}" if candidate.module else candidate.operation
    yield f"{_INDENT}{layout(candidate.count, candidate.shape, candidate.dtype)}{made}, {candidate.when}"
    if text := worked_out(candidate.formula, candidate.numbers):
        yield f"{_INDENT * 2}{text} = {candidate.bytes:,} bytes ({candidate.source})"
    there = format_bytes(candidate.allocated_bytes, unit)
    if candidate.off_bytes is None:
        yield f"{_INDENT * 2}{there} are allocated then"
    else:
        said = candidate.allocated_bytes - candidate.off_bytes
        yield (
            f"{_INDENT * 2}{there} are allocated then as memcalc has it, {format_bytes(said, unit)} in the message: "
            f"{_difference(candidate.off_bytes, said)}"
        )


def _difference(off: int, said: int) -> str:
    share = abs(off) / said if said else 0.0
    return f"{share:.1%} {'more' if off > 0 else 'less'}" if off else "the same"


def _smaller(found: OomAnswer, unit: Unit) -> Iterator[str]:
    if not found.smaller_with:
        yield "No option of memcalc makes the first of them smaller."
        return
    yield "Smaller with:"
    for change in found.smaller_with:
        size = f"then {format_bytes(change.bytes, unit)}" if change.bytes else "then nothing asks for it"
        yield f"{_INDENT}{change.command_line}: {change.name}, {size} ({change.cost})"


def _compared(found: OomAnswer, unit: Unit) -> Iterator[str]:
    """What the message says beside what memcalc has."""
    said = found.message
    numbers = [
        f"{format_bytes(nbytes, unit)} {words}"
        for name, words in (
            ("capacity_bytes", "on the GPU"),
            ("free_bytes", "free"),
            ("process_bytes", "of this process"),
            ("allocated_bytes", "allocated"),
            ("reserved_bytes", "reserved"),
        )
        if (nbytes := said[name]) is not None
    ]
    if numbers:
        yield f"The message: {', '.join(numbers)}."
    peak = f"memcalc: {format_bytes(found.peak_allocated_bytes, unit)} allocated at the peak"
    yield f"{peak}, {format_bytes(found.outside_bytes, unit)} of CUDA context and libraries{_outside(found, unit)}."


def _outside(found: OomAnswer, unit: Unit) -> str:
    if found.off_outside_bytes is None:
        return ""
    return f" ({format_bytes(found.outside_bytes - found.off_outside_bytes, unit)} in the message)"
