"""What `verify` measured beside the estimate, as text."""

from __future__ import annotations

from collections.abc import Iterator

from memcalc.render.tables import Column, laid_out
from memcalc.render.terminal_text import visible
from memcalc.units import Unit, format_bytes
from memcalc.verification.verify import Verification

_COLUMNS = (
    Column("phase", whole=True),
    Column("measured", right=True, whole=True),
    Column("estimated", right=True, whole=True),
    Column("difference", right=True, whole=True),
)


def render(found: Verification, width: int, unit: Unit, *, unicode: bool = True) -> str:
    """The table, with what was run above it."""
    processes = f", the fullest of {found.processes} processes" if found.processes > 1 else ""
    driver = f", driver {found.driver}" if found.driver else ""
    head = f"{found.model} on {found.gpu}{processes}: step {found.steps} (torch {found.torch}{driver})"
    table = laid_out(_COLUMNS, list(_rows(found, unit)), unicode=unicode, width=width)
    return f"{visible(head, unicode)}\n{table}"


def _rows(found: Verification, unit: Unit) -> Iterator[tuple[str, ...]]:
    for phase in found.phases:
        yield _row(f"{phase.phase}, allocated", phase.measured_bytes, phase.estimate_bytes, unit)
    yield _row("reserved", found.reserved_bytes, found.estimate_reserved_bytes, unit)
    if found.process_bytes is not None:
        yield _row("process (nvidia-smi)", found.process_bytes, found.estimate_process_bytes, unit)


def _row(title: str, measured: int, estimate: int | None, unit: Unit) -> tuple[str, ...]:
    if estimate is None:
        return title, format_bytes(measured, unit), "", ""
    off = f"{(estimate - measured) / measured:+.2%}" if measured else ""
    return title, format_bytes(measured, unit), format_bytes(estimate, unit), off
