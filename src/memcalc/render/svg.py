"""The memory of one step over time as one SVG file: no script, nothing from elsewhere, light and dark."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from memcalc.render.areas import COLOURS, HEIGHT, INKS, TITLES, Areas, common_top, shown_name
from memcalc.render.captions import workload
from memcalc.render.terminal_text import clip, visible
from memcalc.report.timeline import Timeline
from memcalc.units import Unit, format_bytes, format_count

WIDTH, TALL = 960, 540
"""Size of the picture, pixels."""

_LEFT, _RIGHT, _UP, _DOWN = 84, 24, 104, 128
_ZONES = 100
_LETTER = 8
"""About the width of a bold letter, pixels."""
_STYLE = """\
:root{--bg:#fff;--fg:#1b1f24;--muted:#59636e;--line:#d1d9e0}
@media(prefers-color-scheme:dark){:root{--bg:#0d1117;--fg:#e6edf3;--muted:#9da7b1;--line:#3d444d}}
text{font:13px system-ui,-apple-system,"Segoe UI",sans-serif;fill:var(--fg)}
.t{font-size:20px;font-weight:600}.m{fill:var(--muted)}.b{font-weight:600}.e{text-anchor:end}.c{text-anchor:middle}
.a{stroke:var(--bg);stroke-width:.7;vector-effect:non-scaling-stroke}
.l{stroke:var(--line);fill:none}.p{stroke:var(--fg);stroke-dasharray:3 3}.g{stroke:var(--fg);stroke-dasharray:8 4}
.z{fill:transparent}.z:hover{fill:var(--fg);fill-opacity:.12}"""


def render(timeline: Timeline, unit: Unit = "GiB", command: Sequence[str] = ()) -> str:
    """The picture; `command` is the line that made it. Names from outside are text, whatever is in them."""
    return "".join(line + "\n" for line in _Svg(Areas(timeline, common_top([timeline]), unit), command).lines())


@dataclass(frozen=True)
class _Svg:
    areas: Areas
    command: Sequence[str]

    def x(self, sample: float) -> float:
        return round(_LEFT + sample * (WIDTH - _LEFT - _RIGHT) / self.areas.width, 1)

    def y(self, nbytes: float) -> float:
        return round(TALL - _DOWN - self.areas.share(nbytes) * (TALL - _UP - _DOWN), 1)

    def lines(self) -> Iterator[str]:
        timeline, unit = self.areas.timeline, self.areas.unit
        peak = timeline.report.peak
        title = f"{shown_name(timeline.report.model.name, 60)}: memory of one step"
        size = format_bytes(peak.process_bytes, unit)
        yield (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {TALL}" width="{WIDTH}" height="{TALL}" '
            'role="img" aria-labelledby="t d">'
        )
        yield f'<title id="t">{escape(title)}</title>'
        yield f'<desc id="d">{escape(f"{size} at the peak: {visible(peak.moment)}")}</desc>'
        yield f'<style>{_STYLE}</style><rect width="100%" height="100%" fill="var(--bg)"/>'
        yield from self._heading()
        yield from self._axes()
        yield from self._stack()
        yield from self._pin(f"{size} · {visible(peak.moment)}")
        yield from self._legend()
        yield "</svg>"

    def _heading(self) -> Iterator[str]:
        report = self.areas.timeline.report
        yield _text(_LEFT, 36, shown_name(report.model.name, 60), "t")
        line = f"{format_count(report.model.parameters.total)} parameters · {workload(report)}"
        if report.gpu is not None:
            room = format_bytes(abs(report.gpu.free_bytes), self.areas.unit)
            fits = f"fits, {room} free" if report.gpu.fits else f"does not fit, {room} too much"
            line += f" · {report.gpu.name}: {fits}"
        yield _text(_LEFT, 58, clip(visible(line), 110), "m")

    def _axes(self) -> Iterator[str]:
        for size, label in self.areas.marks():
            yield f'<path class="l" d="M{_LEFT} {self.y(size)}H{WIDTH - _RIGHT}"/>'
            yield _text(_LEFT - 8, self.y(size) + 4, label, "m e")
        edges = "".join(f"M{self.x(edge)} {TALL - _DOWN}v4" for edge in self.areas.edges())
        yield f'<path class="l" d="{edges}"/>'
        for phase in self.areas.timeline.phases:
            yield f'<path class="l" d="M{self.x(phase.start)} {TALL - _DOWN}v22"/>'
            name = visible(phase.name)
            if self.x(phase.start) + 6 + len(name) * _LETTER <= WIDTH:
                yield _text(self.x(phase.start) + 6, TALL - _DOWN + 18, name, "b")
            else:
                yield _text(WIDTH - 6, TALL - _DOWN + 18, name, "b e")
        for stack in self.areas.timeline.stacks:
            text = visible(f"{stack.name} {stack.first} → {stack.last}")
            if (stack.end - stack.start) / self.areas.width > 0.15:
                yield _text(self.x(stack.start) + 6, TALL - _DOWN + 36, text, "m")

    def _stack(self) -> Iterator[str]:
        width, height = (WIDTH - _LEFT - _RIGHT) / self.areas.width, (TALL - _UP - _DOWN) / HEIGHT
        yield f'<g transform="translate({_LEFT} {_UP}) scale({width:.4f} {height:.4f})">'
        for index, (row, path) in enumerate(self.areas.outlines()):
            edge = ' class="a"' if index else ""  # between two rows
            yield f'<path{edge} fill="{COLOURS[row]}" d="{path}"/>'
        yield "</g>"
        for label in self.areas.labels():
            x, y = _LEFT + label.x * (WIDTH - _LEFT - _RIGHT), TALL - _DOWN - label.y * (TALL - _UP - _DOWN)
            yield _text(round(x), round(y) + 4, self.areas.name(label.row), "b c", f' style="fill:{INKS[label.row]}"')
        if self.areas.limit is not None:
            yield f'<path class="g" d="M{_LEFT} {self.y(self.areas.limit)}H{WIDTH - _RIGHT}"/>'
        for start, end, at in self.areas.pieces(_ZONES):
            yield (
                f'<rect class="z" x="{self.x(start)}" y="{_UP}" width="{round(self.x(end) - self.x(start), 1)}" '
                f'height="{TALL - _UP - _DOWN}"><title>{escape(self._told(at))}</title></rect>'
            )

    def _told(self, at: int) -> str:
        """What a place of the picture says when it is pointed at."""
        sample = self.areas.timeline.samples[at]
        rows = [
            f"{title} {format_bytes(nbytes, self.areas.unit)}"
            for title, nbytes in zip(TITLES, sample.rows, strict=True)
            if nbytes
        ]
        total = format_bytes(sample.total, self.areas.unit)
        return "\n".join((f"{visible(self.areas.timeline.moment(at))}: {total}", *rows))

    def _pin(self, text: str) -> Iterator[str]:
        at = self.areas.timeline.peak
        x, y = self.x(at + 0.5), self.y(self.areas.timeline.samples[at].total)
        yield f'<path class="p" d="M{x} {_UP - 18}V{TALL - _DOWN}"/><circle cx="{x}" cy="{y}" r="4" fill="var(--fg)"/>'
        left = x > WIDTH / 2
        yield _text(x + (-8 if left else 8), _UP - 10, clip(text, 80), "b e" if left else "b")

    def _legend(self) -> Iterator[str]:
        top = self.areas.timeline.samples[self.areas.timeline.peak]
        shown = [row for row in range(len(TITLES)) if any(one.rows[row] for one in self.areas.timeline.samples)]
        for index, row in enumerate(shown):
            x, y = _LEFT + index % 3 * 284, TALL - 66 + index // 3 * 22
            yield f'<rect x="{x}" y="{y - 11}" width="12" height="12" rx="2" fill="{COLOURS[row]}"/>'
            yield _text(x + 20, y, f"{TITLES[row]} {format_bytes(top.rows[row], self.areas.unit)}")
        said = "sizes at the peak; the axis counts allocations, not seconds"
        yield _text(_LEFT, TALL - 16, clip(visible(" ".join(self.command)), 118) if self.command else said, "m")


def _text(x: float, y: float, text: str, kind: str = "", more: str = "") -> str:
    return f'<text x="{x}" y="{y}"{f" class={chr(34)}{kind}{chr(34)}" if kind else ""}{more}>{escape(text)}</text>'
