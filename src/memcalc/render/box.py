"""The box: six rows with bars on one scale, the peak in words, whether it fits, and what was assumed."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest

from memcalc.render.captions import assumption_lines, needs, pooled, served, shown_parts, trained, workload
from memcalc.render.cluster_lines import cluster_lines as _of_cluster
from memcalc.render.styles import Line, Span
from memcalc.render.terminal_text import cells, clip, left, right, visible, wrap
from memcalc.report.schema import Component, Part, Report
from memcalc.units import Unit, format_bytes, format_count

LABELS = {
    "model_weights": ("MODEL WEIGHTS", "blue"),
    "optimizer_states": ("OPTIMIZER STATES", "magenta"),
    "gradients": ("GRADIENTS", "cyan"),
    "activations": ("ACTIVATIONS", "green"),
    "temporary_tensors": ("TEMPORARY TENSORS", "yellow"),
    "other_overhead": ("OTHER OVERHEAD", "red"),
}
"""Title and colour of each row, by its name in the report."""

NARROWEST = 60
"""Columns below which the box is not drawn narrower."""

_WIDE = 78  # from here on the notes have a column of their own; below, they go under the row's title
_LABEL, _HEADING = 18, 9
_NAME = 28
"""Columns of a model's name that stay when words have to go."""


@dataclass(frozen=True)
class _Glyphs:
    """What lines and bars are drawn with. `eighths` are the last cell of a bar, from empty to full."""

    top: str
    middle: str
    bottom: str
    line: str
    side: str
    branch: str
    last: str
    eighths: str
    beyond: str
    dot: str


_UNICODE = _Glyphs("┌┐", "├┤", "└┘", "─", "│", "├── ", "└── ", " ▏▎▍▌▋▊▉█", "░", " · ")
_ASCII = _Glyphs("++", "++", "++", "-", "|", "|-- ", "`-- ", " #", ".", " - ")


def render(report: Report, width: int = 80, unit: Unit = "GiB", unicode: bool = True) -> list[Line]:
    """The box of `report`: every line of it is `width` columns wide (at least `NARROWEST`); assumptions follow below.

    `unicode` chooses blocks and box-drawing characters, else everything is ASCII.
    """
    return _Box(report, max(width, NARROWEST), unit, unicode).lines()


@dataclass(frozen=True)
class _Box:
    report: Report
    width: int
    unit: Unit
    unicode: bool

    @property
    def glyphs(self) -> _Glyphs:
        return _UNICODE if self.unicode else _ASCII

    @property
    def inner(self) -> int:
        return self.width - 4

    @cached_property
    def label(self) -> int:
        """Columns of titles and captions, which grow where there is room."""
        captions = (caption for name, _ in self.report.components.rows() for caption in self._captions(name))
        return min(max([_LABEL, *(cells(caption) + 1 for caption in captions)]), _LABEL + max(0, self.width - 80) // 2)

    @cached_property
    def size(self) -> int:
        """Columns of sizes."""
        sizes = [
            nbytes
            for _, component in self.report.components.rows()
            for nbytes in (component.peak_bytes, *(shown for _, shown in shown_parts(component.parts)))
        ]
        return 1 + max(len(format_bytes(nbytes, self.unit)) for nbytes in sizes)

    @cached_property
    def note(self) -> int:
        """Columns of the notes beside rows; 0 where the box is too narrow for them."""
        notes = (note for name, component in self.report.components.rows() for note in self._notes(name, component))
        return 2 + max((len(note) for note in notes), default=0) if self.width >= _WIDE else 0

    @property
    def body(self) -> int:
        """Columns of bars and part names."""
        return self.inner - self.label - self.size - self.note

    def lines(self) -> list[Line]:
        scale = max(1, *(component.max_bytes for _, component in self.report.components.rows()))
        out = [self._border(self.glyphs.top, "TENSORS", self._subject())]
        for name, component in self.report.components.rows():
            out += [self._framed(line) for line in self._row(name, component, scale)]
        out.append(self._border(self.glyphs.middle))
        for heading, text, style in self._summary():
            for index, line in enumerate(wrap(visible(text, self.unicode), self.inner - _HEADING)):
                out.append(self._framed((Span(left("" if index else heading, _HEADING), "bold"), Span(line, style))))
        out.append(self._border(self.glyphs.bottom, "", self._legend(scale)))
        return out + list(self._assumptions())

    # -- frame --------------------------------------------------------------------------------------------------------

    def _border(self, corners: str, title: str = "", note: str = "") -> Line:
        line = self.glyphs.line
        start = (Span(corners[0] + line, "dim"), Span(f" {title} " if title else "", "bold"))
        end = (Span(f" {note} " if note else ""), Span(line + corners[1], "dim"))
        used = sum(cells(span.text) for span in (*start, *end))
        return (*start, Span(line * (self.width - used), "dim"), *end)

    def _framed(self, content: Line) -> Line:
        used = sum(cells(span.text) for span in content)
        side = self.glyphs.side
        return (Span(side + " ", "dim"), *content, Span(" " * (self.inner - used)), Span(" " + side, "dim"))

    def _subject(self) -> str:
        """Which model and micro-batch, as much of it as fits beside the title."""
        model, job, room = self.report.model, workload(self.report), self.width - 18
        name, count = visible(model.name, self.unicode), format_count(model.parameters.total)
        long, short = ("", "") if count in name else (f", {count} parameters", f", {count}")
        if model.parameters.active < model.parameters.total:
            active = f", {format_count(model.parameters.active)} active"
            long, short = long + active, short + active
        brief = job.removeprefix("batch ").removesuffix(" tokens")
        tails = [f"{long} · {job}", f"{short} · {job}", f"{short} · {brief}"]
        if some := trained(self.report):
            tails = [f"{long}, {some} · {job}", f"{short}, {some} · {job}", f"{short}, {some} · {brief}", *tails]
        tails = [visible(tail, self.unicode) for tail in tails]
        tail = next((tail for tail in tails if min(cells(name), _NAME) + cells(tail) <= room), tails[-1])
        return clip(clip(name, max(8, room - cells(tail)), self.unicode) + tail, room, self.unicode)

    def _legend(self, scale: int) -> str:
        """What the pale end of a bar means, where there is one."""
        if not any(self.glyphs.beyond in self._bar(component, scale) for _, component in self.report.components.rows()):
            return ""
        return f"{self.glyphs.eighths[-1]} at the peak  {self.glyphs.beyond} at the row's own maximum"

    # -- rows ---------------------------------------------------------------------------------------------------------

    def _row(self, name: str, component: Component, scale: int) -> Iterator[Line]:
        title, colour = LABELS[name]
        under, beside = self._captions(name), self._notes(name, component)
        if self.width < _WIDE:
            under, beside = under + beside, []
        bodies = [(self._bar(component, scale), format_bytes(component.peak_bytes, self.unit))]
        bodies += [("", "")] * (len(beside) - 1)  # a note stands beside a part only if it is the part's
        bodies += self._parts(component.parts)
        for index, (head, body, note) in enumerate(zip_longest([title, *under], bodies, beside)):
            text, size = body or ("", "")
            yield (
                Span(left(head or "", self.label, self.unicode), "dim" if index else f"bold {colour}"),
                Span(left(text, self.body, self.unicode), "" if index else colour),
                Span(right(size, self.size), "" if index else "bold"),
                Span("  " + left(note or "", self.note - 2) if self.note else "", "dim"),
            )

    def _bar(self, component: Component, scale: int) -> str:
        eighths = self.glyphs.eighths
        steps = len(eighths) - 1
        filled = component.peak_bytes * self.body * steps // scale
        if component.peak_bytes:
            filled = max(filled, 1)
        whole, part = divmod(filled, steps)
        bar = eighths[-1] * whole + (eighths[part] if part else "")
        return bar + self.glyphs.beyond * (component.max_bytes * self.body // scale - len(bar))

    def _parts(self, parts: tuple[Part, ...]) -> Iterator[tuple[str, str]]:
        shown = shown_parts(parts)
        for index, (name, nbytes) in enumerate(shown):
            branch = self.glyphs.last if index == len(shown) - 1 else self.glyphs.branch
            yield branch + visible(name, self.unicode), format_bytes(nbytes, self.unit)

    def _captions(self, name: str) -> list[str]:
        """What a row's title stands over: the recipe, dtype or optimizer that decides the row."""
        setup = self.report.setup
        key = {"model_weights": "precision" if self.report.training else "dtype", "optimizer_states": "optimizer"}.get(
            name
        )
        value = setup.get(key) if key else None
        if name == "activations" and setup.get("activation_checkpointing") not in (None, "none"):
            value = "checkpointed"
        return [f"({visible(str(value), self.unicode)})"] if value else []

    def _notes(self, name: str, component: Component) -> list[str]:
        notes = []
        ratio, setup = component.bytes_per_parameter, self.report.setup
        if ratio is not None and ratio >= 0.05:
            size = f"{ratio:.1f}".removesuffix(".0")
            notes.append(f"{size} byte{'' if size == '1' else 's'}/param")
        batch, tokens = setup.get("sequences", setup.get("batch")), setup.get("seq_len")
        if name == "activations" and self.report.training and isinstance(batch, int) and isinstance(tokens, int):
            notes.append(format_bytes(component.max_bytes // max(batch * tokens, 1), self.unit) + "/token")
        most = format_bytes(component.max_bytes, self.unit)
        if most != format_bytes(component.peak_bytes, self.unit):
            notes.append(f"up to {most}")
        return notes

    # -- below the rows -----------------------------------------------------------------------------------------------

    def _summary(self) -> Iterator[tuple[str, str, str]]:
        """Heading, text and style of the lines below the rows."""
        peak, phases = self.report.peak, self.report.phases
        yield "PEAK", f"{self._both(peak.allocated_bytes)} allocated: {peak.moment}", ""
        yield "", f"{self._both(peak.reserved_bytes)} reserved by the allocator", ""
        yield "", f"{self._both(peak.process_bytes)} process, in nvidia-smi", ""
        each = (f"{name} {format_bytes(phase.peak_bytes, self.unit)}" for name, phase in phases.items())
        yield "PHASES", " · ".join(each), ""
        if (cluster := self.report.cluster) is not None:
            yield from _of_cluster(cluster, self.report.ranks, self.unit, training=self.report.training)
        if self.report.kv_cache_bytes is not None:
            yield "KV CACHE", format_bytes(self.report.kv_cache_bytes, self.unit), ""
        if (gpu := self.report.gpu) is not None:
            room, total = format_bytes(abs(gpu.free_bytes), self.unit), format_bytes(gpu.usable_bytes, self.unit)
            fits, not_fits = f"fits, {room} of {total} free", f"does not fit, {room} more than its {total}"
            length = f" at {self.report.setup['seq_len']:,} tokens" if self._is_default_length() else ""
            style = "bold green" if gpu.fits else "bold red"
            yield "GPU", f"{gpu.name}: {fits if gpu.fits else not_fits}{length}", style
            if least := needs(self.report, self.unit):
                yield "", least, ""
        if (serving := self.report.serving) is not None:
            yield "SERVES", served(self.report), ""
            if serving.engine_reserved_bytes > peak.process_bytes:
                taken = format_bytes(serving.engine_reserved_bytes, self.unit)
                setup = self.report.setup
                share = f"{setup['gpu_memory_utilization']:.0%} of the GPU"
                beyond = "" if serving.pool is None else ", and CUDA context and graphs"
                yield "", f"{setup['engine']} reserves {taken} ({share}{beyond})", ""
            if serving.pool is not None:
                yield "", pooled(serving.pool, self.unit), ""

    def _is_default_length(self) -> bool:
        """Whether nobody said how long sequences are: the verdict is for that length alone."""
        return any(assumption.code == "sequence_length" for assumption in self.report.assumptions)

    def _both(self, nbytes: int) -> str:
        other: Unit = "GB" if self.unit == "GiB" else "GiB"
        return f"{format_bytes(nbytes, self.unit)} ({format_bytes(nbytes, other)})"

    def _assumptions(self) -> Iterator[Line]:
        if self.report.assumptions:
            yield (Span("Assumptions:", "bold"),)
        bullet = self.glyphs.dot
        for text in assumption_lines(self.report.assumptions):
            for index, line in enumerate(wrap(visible(text, self.unicode), self.width - 3)):
                yield (Span("   " if index else bullet, "dim"), Span(line))
