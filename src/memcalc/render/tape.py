"""The tape as text: a line an allocation, never wrapped, for searching and cutting with other tools."""

from collections.abc import Sequence

from memcalc.provenance.listing import TapeLine
from memcalc.render.terminal_text import cells, visible

_HEADS = ("tick", "dies", "bytes", "live", "phase", "row", "part", "block", "operation", "module")
_NUMBERS = 4
"""The first columns are numbers, aligned to the right."""


def render(lines: Sequence[TapeLine], *, unicode: bool = True) -> str:
    """The lines under their heads."""
    table = [_HEADS, *(tuple(visible(cell, unicode) for cell in _cells(line)) for line in lines)]
    widths = [max(map(cells, column)) for column in zip(*table, strict=True)]
    return "".join("  ".join(map(_padded, row, widths, range(len(row)))).rstrip() + "\n" for row in table)


def _cells(line: TapeLine) -> tuple[str, ...]:
    numbers = line.tick, line.dies, line.bytes, line.live_bytes
    said = ["" if number is None else f"{number:,}" for number in numbers]
    phase = f"{line.phase} (its most)" if line.is_peak else line.phase
    return (*said, phase, line.row, line.part, line.block, line.operation, line.module)


def _padded(cell: str, width: int, column: int) -> str:
    space = " " * (width - cells(cell))
    return space + cell if column < _NUMBERS else cell + space
