"""The picture of a page: areas in SVG, everything that is read in HTML over it, so that text keeps its size.

What the pointer shows is in the page from the start and is shown by its style: there is no script.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from memcalc.autograd.tape import ROWS
from memcalc.provenance.explanation import TensorEntry
from memcalc.render.areas import HEIGHT, TITLES, Areas
from memcalc.render.explanation import layout_of
from memcalc.render.terminal_text import visible
from memcalc.units import format_bytes

_ZONES = 96
_PARTS = 10


@dataclass(frozen=True)
class Picture:
    """One timeline with the largest `tensors` of its peak; `name` tells it from others of its page, for links."""

    areas: Areas
    name: str
    tensors: Sequence[TensorEntry] = ()

    def lines(self) -> Iterator[str]:
        """The elements of the picture, a line each."""
        yield '<figure><div class="chart"><div class="sizes" aria-hidden="true" style="margin-top:48px">'
        for size, label in self.areas.marks():
            yield f'<span style="top:{_percent(1 - self.areas.share(size))}">{label}</span>'
        yield '</div><div class="area" style="margin-top:48px">'
        yield from self._svg()
        yield from self._over()
        yield from self._zones()
        yield from self._pin()
        yield "</div>"
        yield from self._under()
        yield "</div></figure>"

    def _svg(self) -> Iterator[str]:
        report = self.areas.timeline.report
        size = format_bytes(report.peak.process_bytes, self.areas.unit)
        told = f"Memory over one step, stacked by row; {size} at the peak, {visible(report.peak.moment)}."
        yield (
            f'<svg viewBox="0 0 {self.areas.width} {HEIGHT}" preserveAspectRatio="none" role="img" '
            f'aria-label="{escape(told)} The table below has the numbers.">'
        )
        lines = "".join(f"M0 {self.areas.y(size)}H{self.areas.width}" for size, _ in self.areas.marks())
        yield f'<path class="l" d="{lines}"/>'
        for row, path in self.areas.outlines():
            yield f'<path class="a r{row}" d="{path}"/>'
        edges = "".join(f"M{edge:.5g} {HEIGHT}v12" for edge in self.areas.edges())
        yield f'<path class="l" d="{edges}"/>'
        if self.areas.limit is not None:
            yield f'<path class="g" d="M0 {self.areas.y(self.areas.limit)}H{self.areas.width}"/>'
        yield "</svg>"

    def _over(self) -> Iterator[str]:
        for label in self.areas.labels():
            place = f"left:{_percent(label.x)};bottom:{_percent(label.y)}"
            yield f'<span class="name r{label.row}" aria-hidden="true" style="{place}">{self._name(label.row)}</span>'
        gpu = self.areas.timeline.report.gpu
        if self.areas.limit is not None and gpu is not None:
            left = self.areas.lower_at_start
            place = f"bottom:{_percent(self.areas.share(self.areas.limit))};{'left' if left else 'right'}:0"
            size = format_bytes(gpu.usable_bytes, self.areas.unit)
            yield f'<span class="gpu" style="{place}">{escape(visible(gpu.name))}, {size} usable</span>'

    def _name(self, row: int) -> str:
        return escape(self.areas.name(row))

    def _zones(self) -> Iterator[str]:
        """What every place says when it is pointed at."""
        yield '<div class="zones" aria-hidden="true">'
        for start, end, at in self.areas.pieces(_ZONES):
            place = (start + end) / 2 / self.areas.width
            side = f"left:{_percent(place + 0.02)}" if place < 0.5 else f"right:{_percent(1 - place + 0.02)}"
            sample = self.areas.timeline.samples[at]
            rows = "".join(
                f'<span><span class="k r{row}">{TITLES[row]}</span><span>{self._size(nbytes)}</span></span>'
                for row, nbytes in reversed(list(enumerate(sample.rows)))
                if nbytes
            )
            told = f"<p>{self._size(sample.total)} · {escape(visible(self.areas.timeline.moment(at)))}</p>"
            yield f'<div><div class="tip" style="{side}">{told}{rows}</div></div>'
        yield "</div>"

    def _size(self, nbytes: int) -> str:
        return format_bytes(nbytes, self.areas.unit)

    def _pin(self) -> Iterator[str]:
        """The peak: a link to its table, which shows its largest tensors when it is pointed at or has the focus."""
        timeline = self.areas.timeline
        at = timeline.peak
        place, height = (at + 0.5) / self.areas.width, self.areas.share(timeline.samples[at].total)
        peak = timeline.report.peak
        dot = f"top:calc(48px + (100% - 48px)*{1 - height:.4f})"
        yield f'<div class="at" style="left:{_percent(place)}"><i style="{dot}"></i></div>'
        left = place <= 0.5
        side = f"left:{_percent(place)}" if left else f"right:{_percent(1 - place)};text-align:right"
        room = _percent(1 - place if left else place)
        yield (
            f'<a class="pin" href="#{self.name}" aria-describedby="{self.name}-tip" style="{side};max-width:{room}">'
            f"{self._size(peak.process_bytes)} · {escape(visible(peak.moment))}</a>"
        )
        yield f'<div class="tip" id="{self.name}-tip" role="tooltip" style="{side.split(";")[0]}">'
        yield f"<p>Alive at the peak: {escape(visible(peak.moment))}</p>"
        for row, name, nbytes in self._tensors():
            yield f'<span><span class="k r{row}">{escape(visible(name))}</span><span>{self._size(nbytes)}</span></span>'
        yield "</div>"

    def _tensors(self) -> list[tuple[int, str, int]]:
        """Row, name and bytes of the largest tensors at the peak, or of its parts where they are not known."""
        if self.tensors:
            return [
                (ROWS.index(entry.row), f"{layout_of(entry)} {entry.module or entry.operation}".strip(), entry.bytes)
                for entry in self.tensors[:_PARTS]
            ]
        rows = enumerate(self.areas.timeline.report.components.rows())
        parts = [(row, part.name, part.bytes) for row, (_, component) in rows for part in component.parts]
        return sorted(parts, key=lambda part: -part[2])[:_PARTS]

    def _under(self) -> Iterator[str]:
        """Phases and blocks, under the axis."""
        width = self.areas.width
        yield '<div class="under">'
        for phase in self.areas.timeline.phases:
            wide = _percent((phase.end - phase.start) / width)
            place = f"left:{_percent(phase.start / width)};width:{wide}"
            if phase is self.areas.timeline.phases[-1]:  # a long name of a short phase grows to the left
                place = f"right:0;min-width:{wide}"
            yield f'<b style="{place}">{escape(visible(phase.name))}</b>'
        for stack in self.areas.timeline.stacks:
            if (stack.end - stack.start) / width > 0.1:
                place = f"left:{_percent(stack.start / width)};width:{_percent((stack.end - stack.start) / width)}"
                text = f"{stack.name} {stack.first} → {stack.last}" if stack.first != stack.last else stack.name
                yield f'<small style="{place}">{escape(visible(text))}</small>'
        yield "</div>"


def _percent(share: float) -> str:
    return f"{share * 100:.2f}".rstrip("0").rstrip(".") + "%"
