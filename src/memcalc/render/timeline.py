"""The memory of one step over time, in the terminal: the six rows stacked, the peak pinned, phases under the axis."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from memcalc.peak.timeline import Stretch
from memcalc.render.box import LABELS
from memcalc.render.captions import workload
from memcalc.render.styles import Line, Span
from memcalc.render.terminal_text import cells, clip, left, right, visible, wrap
from memcalc.report.timeline import Timeline
from memcalc.units import Unit, format_bytes, format_count, round_step

NARROWEST, WIDEST = 60, 200
"""Bounds of the picture, columns."""

HEIGHT = 16
"""Lines of the picture without axis and captions."""

_GUTTER = 10
_SHADES = ("█", "▓", "▒", "░", "╱", "·")
_LETTERS = ("W", "O", "G", "A", "T", "x")
_COLOURS = tuple(colour for _, colour in LABELS.values())
_ENTRY = 29
"""Columns of an entry of the legend."""
_NEAR = 1.6
"""The GPU's memory is drawn where it is at most so many times the peak."""


def columns(width: int) -> int:
    """Pieces of the axis for a picture that is `width` columns wide."""
    return min(max(width, NARROWEST), WIDEST) - _GUTTER - 1


def render(
    timeline: Timeline, width: int = 80, unit: Unit = "GiB", unicode: bool = True, colour: bool = False
) -> list[Line]:
    """The picture, `width` columns wide (within `NARROWEST` and `WIDEST`); its timeline has `columns(width)` samples.

    With `colour` a row of the box is told by its colour, else by its shade, or by a letter without `unicode`.
    """
    return list(_Picture(timeline, min(max(width, NARROWEST), WIDEST), unit, unicode, colour).lines())


@dataclass(frozen=True)
class _Picture:
    timeline: Timeline
    width: int
    unit: Unit
    unicode: bool
    colour: bool

    @property
    def limit(self) -> int | None:
        """Bytes of the GPU, where they are near enough to be drawn."""
        gpu, peak = self.timeline.report.gpu, self.timeline.report.peak.process_bytes
        return gpu.usable_bytes if gpu is not None and gpu.usable_bytes <= peak * _NEAR else None

    @property
    def top(self) -> int:
        """Bytes at the upper end of the axis."""
        return max(self.timeline.report.peak.process_bytes, self.limit or 0, 1)

    @property
    def glyphs(self) -> tuple[str, ...]:
        if self.colour:
            return ("█" if self.unicode else "#",) * len(_COLOURS)
        return _SHADES if self.unicode else _LETTERS

    def lines(self) -> Iterator[Line]:
        yield (Span(self._subject(), "bold"),)
        yield from self._pin()
        halves = [self._halves(sample.rows) for sample in self.timeline.samples]
        marks, limit = self._marks(), None if self.limit is None else self._line_of(self.limit)
        for line in reversed(range(HEIGHT)):
            label = right(marks.get(line, ""), _GUTTER - 2)
            edge = ("┤" if line in marks else "│") if self.unicode else "|"
            drawn = [self._cell(column, line, line == limit) for column in halves]
            yield (Span(f"{label} ", "dim"), Span(edge, "dim"), *_joined(drawn))
        yield from self._below()
        yield from self._legend()

    def _subject(self) -> str:
        report = self.timeline.report
        name, count = visible(report.model.name, self.unicode), format_count(report.model.parameters.total)
        tail = visible(f"{'' if count in name else f', {count} parameters'} · {workload(report)}", self.unicode)
        return clip(clip(name, max(8, self.width - cells(tail)), self.unicode) + tail, self.width, self.unicode)

    def _pin(self) -> Iterator[Line]:
        """The peak in words, with an arrow over its column."""
        peak, before = self.timeline.report.peak, _GUTTER + self.timeline.peak
        arrow = "▼" if self.unicode else "v"
        text = visible(f"{format_bytes(peak.process_bytes, self.unit)}: {peak.moment}", self.unicode)
        if before + 2 + cells(text) <= self.width:
            yield (Span(" " * before + f"{arrow} {text}", "bold"),)
        elif cells(text) + 1 <= before:
            yield (Span(right(text, before - 1) + f" {arrow}", "bold"),)
        else:
            text = clip(text, self.width, self.unicode)
            yield (Span(" " * min(max(before - cells(text) // 2, 0), self.width - cells(text)) + text, "bold"),)
            yield (Span(" " * before + arrow, "bold"),)

    # -- the area -----------------------------------------------------------------------------------------------------

    def _line_of(self, nbytes: int) -> int:
        """The line of the area in which `nbytes` lies."""
        return min(nbytes * HEIGHT // self.top, HEIGHT - 1)

    def _halves(self, rows: tuple[int, ...]) -> list[int]:
        """The row of the box in each half line of a column, from below."""
        out: list[int] = []
        total = 0
        for index, nbytes in enumerate(rows):
            total += nbytes
            filled = (total * HEIGHT * 2 + self.top // 2) // self.top
            out += [index] * (filled - len(out))
        return out

    def _cell(self, halves: list[int], line: int, limit: bool) -> Span:
        """One character: two halves in two colours, or the shade of the lower half."""
        lower, upper = (halves[at] if at < len(halves) else None for at in (2 * line, 2 * line + 1))
        if limit:
            over = "╌" if self.unicode else "-"
            return Span(over, "bold" if lower is None or not self.colour else f"bold white on {_COLOURS[lower]}")
        if lower is None:
            return Span(" ")
        if not self.colour or lower == upper or not self.unicode:
            return Span(self.glyphs[lower], _COLOURS[lower] if self.colour else "")
        return Span("▄", _COLOURS[lower] + ("" if upper is None else f" on {_COLOURS[upper]}"))

    def _marks(self) -> dict[int, str]:
        """The sizes beside the axis, by line."""
        step = round_step(self.top, self.unit)
        marks = {}
        for size in range(step, self.top + 1, step):
            said = format_bytes(size, self.unit)
            marks[self._line_of(size)] = said if len(said) <= _GUTTER - 2 else said.replace(".0 ", " ").replace(",", "")
        if self.limit is not None:
            marks[self._line_of(self.limit)] = "GPU"
        return marks

    # -- below the area -----------------------------------------------------------------------------------------------

    def _below(self) -> Iterator[Line]:
        """The axis, and under it the phases and the blocks that run in them."""
        phases = self.timeline.phases
        ends = {round(stretch.end) - 1 for stretch in phases[:-1]}
        corner, line, cross = ("└", "─", "┴") if self.unicode else ("+", "-", "+")
        axis = "".join(cross if at in ends else line for at in range(len(self.timeline.samples)))
        yield (Span(f"{'0':>{_GUTTER - 2}} {corner}{axis}", "dim"),)
        yield (Span(" " * _GUTTER + self._beside(phases, lambda stretch: stretch.name), "bold"),)
        blocks = self.timeline.stacks
        if blocks:
            yield (Span(" " * _GUTTER + self._beside(blocks, self._blocks), "dim"),)

    def _beside(self, stretches: Sequence[Stretch], text_of: Callable[[Stretch], str]) -> str:
        """A text under each stretch that has room for it."""
        out = ""
        for stretch in stretches:
            text = visible(text_of(stretch), self.unicode)
            start = round(stretch.start)
            room = round(stretch.end) - start - (stretch is not stretches[-1])
            if cells(text) <= room and start >= cells(out):
                out += " " * (start - cells(out)) + text + " "
        return out.rstrip()

    def _blocks(self, stretch: Stretch) -> str:
        count = "" if stretch.first == stretch.last else f" → {stretch.last}"
        return f"{stretch.name} {stretch.first}{count}"

    def _legend(self) -> Iterator[Line]:
        """Every row that holds anything, with its size at the peak."""
        sample = self.timeline.samples[self.timeline.peak]
        entries = []
        for index, (title, colour) in enumerate(LABELS.values()):
            if any(one.rows[index] for one in self.timeline.samples):
                text = f" {title.lower()} {format_bytes(sample.rows[index], self.unit)}"
                entries.append((Span(self.glyphs[index], colour if self.colour else ""), Span(text)))
        per_line = max(1, (self.width - 2) // _ENTRY)
        for start in range(0, len(entries), per_line):
            shown = entries[start : start + per_line]
            padded = [(glyph, Span(left(text.text, _ENTRY - 1))) for glyph, text in shown[:-1]]
            yield (Span("  "), *(span for entry in (*padded, shown[-1]) for span in entry))
        gpu = self.timeline.report.gpu
        if gpu is not None:
            room, total = format_bytes(abs(gpu.free_bytes), self.unit), format_bytes(gpu.usable_bytes, self.unit)
            text = f"fits, {room} of {total} free" if gpu.fits else f"does not fit, {room} more than its {total}"
            yield (Span("  "), Span(visible(f"{gpu.name}: {text}", self.unicode), "bold"))
        note = "sizes at the peak, of the whole process; the axis counts allocations, not seconds"
        yield from ((Span(f"  {text}", "dim"),) for text in wrap(note, self.width - 2))


def _joined(spans: list[Span]) -> Iterator[Span]:
    """Neighbours of one style as one span, without the blank end."""
    while spans and spans[-1].text == " ":
        spans.pop()
    for style, group in groupby(spans, key=lambda span: span.style):
        yield Span("".join(span.text for span in group), style)
