"""The tables of a page: rows and their parts, tensors, remedies, the picture in numbers, setups as columns."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from memcalc.autograd.tape import ROWS
from memcalc.render.areas import TITLES, shown_name
from memcalc.render.captions import shown_parts
from memcalc.render.explanation import layout_of
from memcalc.render.page_setup import Setup
from memcalc.render.terminal_text import visible
from memcalc.report.schema import Report
from memcalc.report.timeline import Timeline
from memcalc.units import Unit, format_bytes


def scrolled(label: str, name: str = "") -> str:
    """The beginning of what can be scrolled sideways, with the keyboard too; `label` says what it is."""
    identity = f' id="{name}"' if name else ""
    return f'<div class="scroll" role="region" aria-label="{label}" tabindex="0"{identity}>'


@dataclass(frozen=True)
class Tables:
    """Tables with sizes in `unit`; on a page of several setups the longer ones are folded."""

    unit: Unit
    several: bool = False

    def size(self, nbytes: int) -> str:
        """Bytes in the page's unit."""
        return format_bytes(nbytes, self.unit)

    def rows(self, report: Report, scale: int, name: str) -> Iterator[str]:
        """The six rows of the box with their parts, and bars that are full at `scale` bytes."""
        yield scrolled("rows of the box", name)
        yield '<table><thead><tr><th scope="col">row</th>'
        yield '<th scope="col">at the peak</th><th scope="col">own maximum</th></tr></thead>'
        for row, (_, component) in enumerate(report.components.rows()):
            if not component.max_bytes:
                continue
            width, full = component.max_bytes * 100 / scale, component.peak_bytes * 100 / component.max_bytes
            bar = f'<span class="bar" style="--w:{width:.1f}%;--p:{full:.1f}%"></span>'
            yield f'<tbody class="r{row}"><tr><th scope="row" class="k">{TITLES[row]}{bar}</th>'
            yield f"<td>{self.size(component.peak_bytes)}</td><td>{self.size(component.max_bytes)}</td></tr></tbody>"
            if parts := shown_parts(component.parts):
                yield '<tbody class="parts">'
                for part, nbytes in parts:
                    yield f'<tr><th scope="row">{escape(visible(part))}</th><td>{self.size(nbytes)}</td><td></td></tr>'
                yield "</tbody>"
        yield '<tbody><tr><th scope="row">whole process</th>'
        yield f"<td><b>{self.size(report.peak.process_bytes)}</b></td><td></td></tr></tbody></table></div>"

    def tensors(self, setup: Setup) -> Iterator[str]:
        """The largest tensors at the peak: what made them and why they are alive."""
        if not setup.tensors:
            return
        yield f"<details{'' if self.several else ' open'}><summary>The largest tensors at the peak</summary>"
        yield scrolled("largest tensors")
        yield '<table class="tensors"><thead><tr><th scope="col">tensors</th>'
        yield '<th scope="col">made by</th><th scope="col">alive because</th><th scope="col">size</th></tr></thead>'
        yield "<tbody>"
        for entry in setup.tensors:
            layout = layout_of(entry) or entry.part
            made = f"{entry.module} · {entry.operation}" if entry.module else entry.operation
            cells = "".join(f"<td>{escape(visible(text))}</td>" for text in (made, entry.alive_because))
            row = ROWS.index(entry.row)
            yield f'<tr class="r{row}"><th scope="row" class="k">{escape(visible(layout))}</th>{cells}'
            yield f"<td>{self.size(entry.bytes)}</td></tr>"
        yield "</tbody></table></div></details>"

    def remedies(self, report: Report) -> Iterator[str]:
        """What would make it fit."""
        if report.remedies is None or not report.remedies.alone:
            return
        yield "<details open><summary>What makes it smaller, each by itself</summary>"
        yield scrolled("remedies")
        yield '<table class="tensors"><thead><tr><th scope="col">what</th><th scope="col">what it costs</th>'
        yield '<th scope="col">option</th><th scope="col">saves</th></tr></thead><tbody>'
        for offer in report.remedies.alone:
            cells = f"<td>{escape(visible(offer.cost))}</td><td><code>{escape(visible(offer.change))}</code></td>"
            fits = ' <span class="ok">✓ fits</span>' if offer.fits else ""
            yield f'<tr><th scope="row">{escape(visible(offer.name))}{fits}</th>{cells}'
            yield f"<td>{self.size(offer.saved_bytes)}</td></tr>"
        yield "</tbody></table></div></details>"

    def phases(self, timeline: Timeline) -> Iterator[str]:
        """What the picture shows, in numbers: where each phase begins and ends, and its fullest moment."""
        yield "<details><summary>The picture as a table</summary>"
        yield scrolled("moments of the step")
        yield "<table><thead><tr>"
        yield '<th scope="col">moment</th><th scope="col">total</th>'
        yield "".join(f'<th scope="col">{title}</th>' for title in TITLES) + "</tr></thead><tbody>"
        for at in _moments(timeline):
            sample = timeline.samples[at]
            cells = "".join(f"<td>{self.size(nbytes)}</td>" for nbytes in (sample.total, *sample.rows))
            yield f'<tr><th scope="row">{escape(visible(timeline.moment(at)))}</th>{cells}</tr>'
        yield "</tbody></table></div></details>"

    def compared(self, setups: Sequence[Setup]) -> Iterator[str]:
        """The setups as columns, with what each has more or less than the first."""
        yield scrolled("setups")
        yield '<table class="compared"><thead><tr><th scope="col">at the peak</th>'
        for setup in setups:
            yield f'<th scope="col">{escape(shown_name(setup.heading or setup.report.model.name, 60))}</th>'
        yield "</tr></thead><tbody>"
        for row, title in enumerate(TITLES):
            sizes = [[one.peak_bytes for _, one in setup.report.components.rows()][row] for setup in setups]
            yield f'<tr class="r{row}"><th scope="row" class="k">{title}</th>{self._cells(sizes)}</tr>'
        totals = [setup.report.peak.process_bytes for setup in setups]
        yield f'<tr><th scope="row">whole process</th>{self._cells(totals)}</tr></tbody></table></div>'

    def _cells(self, sizes: list[int]) -> str:
        out = f"<td>{self.size(sizes[0])}</td>"
        for size in sizes[1:]:
            more = size - sizes[0]
            change = f' <small class="m">{"+" if more > 0 else "−"}{self.size(abs(more))}</small>' if more else ""
            out += f"<td>{self.size(size)}{change}</td>"
        return out


def _moments(timeline: Timeline) -> list[int]:
    """The ends of each phase, its quarters and its fullest moment."""
    chosen = {timeline.peak}
    for name in dict.fromkeys(sample.phase for sample in timeline.samples):
        within = [at for at, sample in enumerate(timeline.samples) if sample.phase == name]
        thirds = (within[len(within) * part // 4] for part in (1, 2, 3))
        chosen |= {within[0], within[-1], *thirds, max(within, key=lambda at: timeline.samples[at].total)}
    return sorted(chosen)
