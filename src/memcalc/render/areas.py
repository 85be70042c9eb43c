"""The geometry of a picture: outlines of the stacked rows, marks of its axes, and what stands at each place."""

from collections.abc import Iterator
from dataclasses import dataclass

from memcalc.render.box import LABELS
from memcalc.render.terminal_text import clip, visible
from memcalc.report.timeline import Timeline
from memcalc.units import Unit, format_bytes, round_step

TITLES = tuple(title.lower() for title, _ in LABELS.values())
"""The six rows in words, in the order of the box."""

COLOURS = ("#0072b2", "#cc79a7", "#56b4e9", "#009e73", "#e69f00", "#d55e00")
"""Of the six rows: the palette of Okabe and Ito, which is told apart with every kind of colour vision (Color Universal
Design, 2008). In the order of the box's colours: blue, magenta, cyan, green, yellow, red."""

INKS = ("#ffffff", "#111111", "#111111", "#111111", "#111111", "#111111")
"""Of text on those colours: at least 4.5 to 1 (WCAG 2.2, contrast minimum)."""

HEIGHT = 1000
"""Units of the outlines from bottom to top; across, a unit is a sample."""

_NEAR = 1.6
"""The GPU's memory is drawn where it is at most so many times the largest peak."""
_LONGEST_NAME = 120


@dataclass(frozen=True)
class Label:
    """A row's name where its band is thickest: places are shares of width and height, from the lower left."""

    row: int
    x: float
    y: float


@dataclass(frozen=True)
class Areas:
    """One timeline on an axis that ends at `top` bytes."""

    timeline: Timeline
    top: int
    unit: Unit

    @property
    def width(self) -> int:
        """Units of the outlines from left to right."""
        return len(self.timeline.samples)

    def outlines(self) -> Iterator[tuple[int, str]]:
        """Row and SVG path, the uppermost row first: each covers what lies under it."""
        for row in reversed(range(len(TITLES))):
            if any(sample.rows[row] for sample in self.timeline.samples):
                yield row, self._outline([sum(sample.rows[: row + 1]) for sample in self.timeline.samples])

    def _outline(self, totals: list[int]) -> str:
        heights = [self.y(nbytes) for nbytes in totals]
        path = [f"M0 {HEIGHT}V{heights[0]}"]
        for at in range(1, len(heights)):
            if heights[at] != heights[at - 1]:
                path.append(f"H{at}V{heights[at]}")
        return "".join(path) + f"H{len(heights)}V{HEIGHT}Z"

    def y(self, nbytes: int) -> int:
        """Units from the upper end of the axis."""
        return HEIGHT - round(nbytes * HEIGHT / self.top)

    def share(self, nbytes: float) -> float:
        """Part of the axis' height, from below."""
        return nbytes / self.top

    def marks(self) -> list[tuple[int, str]]:
        """The sizes beside the axis, 0 first."""
        step = round_step(self.top, self.unit)
        return [(size, format_bytes(size, self.unit) if size else "0") for size in range(0, self.top + 1, step)]

    @property
    def limit(self) -> int | None:
        """Bytes of the GPU, where they lie on the axis."""
        gpu = self.timeline.report.gpu
        return gpu.usable_bytes if gpu is not None and gpu.usable_bytes <= self.top else None

    @property
    def lower_at_start(self) -> bool:
        """Whether there is more room for words over the first quarter than over the last."""
        samples, quarter = self.timeline.samples, max(self.width // 4, 1)
        return sum(one.total for one in samples[:quarter]) <= sum(one.total for one in samples[-quarter:])

    def labels(self, thickness: float = 0.08) -> Iterator[Label]:
        """A name for each row whose band is at least so thick somewhere, there."""
        samples, peak = self.timeline.samples, self.timeline.peak
        edge = max(len(samples) // 7, 1)
        inside = [at for at in range(edge, len(samples) - edge) if abs(at - peak) > edge] or range(len(samples))
        for row in range(len(TITLES)):
            at = max(inside, key=lambda at: (_thickness(self.timeline, row, at), -abs(at - len(samples) / 2)))
            if self.share(_thickness(self.timeline, row, at)) >= thickness:
                rows = samples[at].rows
                yield Label(row, (at + 0.5) / len(samples), self.share(sum(rows[:row]) + rows[row] / 2))

    def name(self, row: int) -> str:
        """What to call the band of a row: by the part that is most of it, where that is no tensor of a step."""
        component = list(self.timeline.report.components.rows())[row][1]
        largest = max(component.parts, key=lambda part: part.bytes, default=None)
        if row == len(TITLES) - 1 and largest is not None and largest.bytes * 2 > component.peak_bytes:
            return f"{TITLES[row]}: {visible(largest.name)}"
        return TITLES[row]

    def pieces(self, count: int) -> Iterator[tuple[int, int, int]]:
        """Start, end and fullest sample of `count` equal parts of the axis."""
        length = self.width
        for piece in range(min(count, length)):
            start, end = piece * length // min(count, length), (piece + 1) * length // min(count, length)
            yield start, end, max(range(start, end), key=lambda at: self.timeline.samples[at].total)

    def edges(self) -> list[float]:
        """Where a block ends, for stacks whose blocks are wide enough to be told apart."""
        return [
            edge
            for stack in self.timeline.stacks
            if (stack.end - stack.start) * 200 >= len(stack.edges()) * self.width
            for edge in stack.edges()
        ]


def _thickness(timeline: Timeline, row: int, at: int) -> int:
    """The least bytes of a row around a sample, so that text fits into its band."""
    around = timeline.samples[max(at - len(timeline.samples) // 20, 0) : at + len(timeline.samples) // 20 + 1]
    return min(sample.rows[row] for sample in around)


def common_top(timelines: list[Timeline]) -> int:
    """The end of an axis that several pictures share."""
    peak = max(timeline.report.peak.process_bytes for timeline in timelines)
    gpus = [timeline.report.gpu.usable_bytes for timeline in timelines if timeline.report.gpu is not None]
    near = [nbytes for nbytes in gpus if nbytes <= peak * _NEAR]
    return max(peak, *near, 1) * 104 // 100


def shown_name(name: str, longest: int = _LONGEST_NAME) -> str:
    """A name from outside on one line, of a length that a page can bear; not escaped."""
    return clip(visible(name), longest)
