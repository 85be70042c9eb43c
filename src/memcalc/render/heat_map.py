"""A grid of sizes as a heat map: in the terminal, and as the table of a page."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape

from memcalc.render.styles import Line, Span
from memcalc.render.terminal_text import cells, right, visible, wrap
from memcalc.units import Unit, format_bytes

_HEAT = "▁▂▃▄▅▆▇█"
_DIGITS = "12345678"
_TIGHT = 0.1
"""What fits is called tight where less than this share of the GPU is free."""
_STYLES = {"fits": "black on green", "tight": "black on yellow", "no": "white on red"}
_LEVELS = ("black on cyan", "black on cyan", "white on blue", "white on blue", "white on magenta", "white on magenta")


@dataclass(frozen=True)
class Cell:
    """The size of one setup, and what is free of the GPU then; None where it cannot be computed, or without a GPU."""

    nbytes: int | None
    free: int | None = None

    @property
    def verdict(self) -> str:
        """Fits, tight, no; "" without a GPU or an answer."""
        if self.nbytes is None or self.free is None:
            return ""
        return "no" if self.free < 0 else "tight" if self.free < (self.nbytes + self.free) * _TIGHT else "fits"


@dataclass(frozen=True)
class Grid:
    """Sizes by two options: `rows` has a line for each value of `down`, a cell for each value of `across`."""

    down: str
    across: str
    down_values: Sequence[str]
    across_values: Sequence[str]
    rows: Sequence[Sequence[Cell]]

    @cached_property
    def sizes(self) -> list[int]:
        """All sizes that could be computed."""
        return [cell.nbytes for row in self.rows for cell in row if cell.nbytes is not None]

    def turned(self) -> "Grid":
        """The same with rows for columns."""
        rows = list(zip(*self.rows, strict=True))
        return Grid(self.across, self.down, self.across_values, self.down_values, rows)


def render(grid: Grid, width: int = 80, unit: Unit = "GiB", unicode: bool = True) -> list[Line]:
    """The grid with a size in each cell where `width` columns have room for them, else with one mark for each."""
    for brief in (False, True):
        for one in (grid, grid.turned()):
            drawn = _Map(one, unit, unicode, brief)
            if drawn.width <= width:
                return list(drawn.lines(width))
    return list(_Map(grid, unit, unicode, brief=True).lines(width))


@dataclass(frozen=True)
class _Map:
    grid: Grid
    unit: Unit
    unicode: bool
    brief: bool

    @property
    def head(self) -> str:
        return f"{self.grid.down} down, {self.grid.across} across"

    @cached_property
    def label(self) -> int:
        return max(map(cells, self.grid.down_values))

    @cached_property
    def column(self) -> int:
        if self.brief:
            return 1
        texts = [self._text(cell) for row in self.grid.rows for cell in row]
        return max(map(cells, (*texts, *self.grid.across_values))) + 2

    @property
    def width(self) -> int:
        return self.label + 2 + len(self.grid.across_values) * self.column

    def _text(self, cell: Cell) -> str:
        if cell.nbytes is None:
            return "-"
        return f"{format_bytes(cell.nbytes, self.unit)} {self._mark(cell)}".rstrip()

    @cached_property
    def _ends(self) -> tuple[int, int]:
        return min(self.grid.sizes), max(self.grid.sizes)

    def _level(self, cell: Cell) -> int:
        """How large a size is, of the GPU or among all, from 0 to 7."""
        if cell.nbytes is not None and cell.free is not None:
            return min(cell.nbytes * 8 // max(cell.nbytes + cell.free, 1), 7)
        least, most = self._ends
        return ((cell.nbytes or 0) - least) * 7 // max(most - least, 1)

    def _mark(self, cell: Cell) -> str:
        if cell.nbytes is None:
            return " "
        if cell.verdict == "no":
            return "×" if self.unicode else "x"
        if cell.verdict and not self.brief:
            return "✓" if self.unicode else "v"
        return (_HEAT if self.unicode else _DIGITS)[self._level(cell)]

    def _style(self, cell: Cell) -> str:
        if cell.nbytes is None:
            return "dim"
        return _STYLES.get(cell.verdict) or _LEVELS[self._level(cell) * (len(_LEVELS) - 1) // 7]

    def lines(self, width: int) -> Iterator[Line]:
        """The heads, a line for each row, and what the marks mean."""
        yield (Span(visible(self.head, self.unicode), "bold"),)
        if self.brief:
            ends = f"{self.grid.across_values[0]} to {self.grid.across_values[-1]}"
            yield (Span(" " * (self.label + 2) + visible(ends, self.unicode), "dim"),)
        else:
            heads = "".join(right(visible(value) + "  ", self.column) for value in self.grid.across_values)
            yield (Span((" " * (self.label + 2) + heads).rstrip(), "bold"),)
        per_line = max((width - self.label - 2) // self.column, 1) if self.brief else len(self.grid.across_values)
        for value, row in zip(self.grid.down_values, self.grid.rows, strict=True):
            for start in range(0, len(row), per_line):
                name = right(visible(value) if not start else "", self.label) + "  "
                yield (Span(name), *(self._cell(cell) for cell in row[start : start + per_line]))
        yield from ((Span(line, "dim"),) for line in wrap(self._legend(), width))

    def _cell(self, cell: Cell) -> Span:
        text = self._mark(cell) if self.brief else right(self._text(cell) + " ", self.column)
        return Span(text, self._style(cell))

    def _legend(self) -> str:
        if not self.grid.sizes:
            return "no setup can be computed"
        marks = _HEAT if self.unicode else _DIGITS
        least, most = format_bytes(min(self.grid.sizes), self.unit), format_bytes(max(self.grid.sizes), self.unit)
        if any(cell.free is not None for row in self.grid.rows for cell in row):
            text = f"from {least} to {most}"
            text += f"; {marks[0]} to {marks[-1]}: eighths of the GPU" if self.brief else ""
        else:
            text = f"{marks[0]} {least} to {marks[-1]} {most}"
        if any(cell.verdict == "no" for row in self.grid.rows for cell in row):
            text += f", {'×' if self.unicode else 'x'} does not fit"
        if any(cell.nbytes is None for row in self.grid.rows for cell in row):
            text += f", {'blank' if self.brief else '-'} cannot be computed"
        return text


def html(grid: Grid, unit: Unit = "GiB") -> str:
    """The grid as the table of a page; what a colour says stands in the cell too."""
    heads = "".join(f'<th scope="col">{escape(visible(value))}</th>' for value in grid.across_values)
    corner = escape(f"{grid.down} \\ {grid.across}")
    lines = [f'<table class="heat"><thead><tr><th scope="col">{corner}</th>{heads}</tr></thead><tbody>']
    least, most = min(grid.sizes, default=0), max(grid.sizes, default=1)
    for value, row in zip(grid.down_values, grid.rows, strict=True):
        drawn = []
        for cell in row:
            if cell.nbytes is None:
                drawn.append("<td>–</td>")
                continue
            said = {"no": "✗", "fits": "✓", "tight": "✓", "": ""}[cell.verdict]
            heat = (cell.nbytes - least) * 100 // max(most - least, 1)
            kind = f' class="{cell.verdict}"' if cell.verdict else ""
            drawn.append(f'<td{kind} style="--h:{heat}%">{format_bytes(cell.nbytes, unit)} {said}</td>')
        lines.append(f'<tr><th scope="row">{escape(visible(value))}</th>{"".join(drawn)}</tr>')
    return "\n".join([*lines, "</tbody></table>\n"])
