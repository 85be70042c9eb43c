"""A report as one HTML page that needs nothing else: pictures over time, rows, peak, assumptions, the command.

There is no script in it, and its policy allows none; every name from outside is escaped. It is light or dark as the
reader's system is, can be printed, and what the pictures show stands in tables too.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from memcalc.render import box, styles
from memcalc.render.areas import Areas, common_top, shown_name
from memcalc.render.captions import assumption_lines, needs, served, trained, workload
from memcalc.render.html_picture import Picture
from memcalc.render.html_tables import Tables, scrolled
from memcalc.render.page_setup import Setup
from memcalc.render.page_style import AROUND, style
from memcalc.render.terminal_text import visible
from memcalc.units import Unit, format_bytes, format_count

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


def page(setups: Sequence[Setup], unit: Unit = "GiB", command: Sequence[str] = ()) -> str:
    """A whole page of one setup, or of several side by side; `command` is the line that made it."""
    title = "memcalc: " + ", ".join(shown_name(setup.heading or setup.report.model.name, 60) for setup in setups[:4])
    return around(title, fragment(setups, unit, command))


def table_page(title: str, table: str, command: Sequence[str] = ()) -> str:
    """A page with a table that is HTML already, under a `title` that is text."""
    body = f"<h1>{escape(visible(title))}</h1>{scrolled('sizes')}{table}</div>{_made_with(command)}"
    return around(title, f'<main class="memcalc"><style>{style()}</style>\n{body}</main>\n')


def around(title: str, body: str) -> str:
    """A whole page around `body`, which is HTML already; `title` is text."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width,initial-scale=1"><meta name="color-scheme" '
        f'content="light dark"><title>{escape(visible(title))}</title><style>{AROUND}</style></head><body>\n'
        f"{body}</body></html>\n"
    )


def fragment(setups: Sequence[Setup], unit: Unit = "GiB", command: Sequence[str] = ()) -> str:
    """The same as a piece of another page, such as a notebook's."""
    lines = _Page(setups, unit, command).lines()
    kind = "memcalc many" if len(setups) > 1 else "memcalc"
    return f'<main class="{kind}"><style>{style()}</style>\n' + "".join(line + "\n" for line in lines) + "</main>\n"


@dataclass(frozen=True)
class _Page:
    setups: Sequence[Setup]
    unit: Unit
    command: Sequence[str]

    def lines(self) -> Iterator[str]:
        several = len(self.setups) > 1
        if several:
            yield f"<header><h1>{len(self.setups)} setups side by side</h1></header>"
            yield from self.tables.compared(self.setups)
            yield '<div class="setups">'
        drawn = [setup.timeline for setup in self.setups if setup.timeline is not None]
        top = common_top(drawn) if drawn else 1
        scale = max(component.max_bytes for setup in self.setups for _, component in setup.report.components.rows())
        for index, setup in enumerate(self.setups):
            yield "<article>" if several else '<article class="only">'
            yield from self._setup(setup, top, max(scale, 1), f"peak-{index + 1}")
            yield "</article>"
        if several:
            yield "</div>"
        yield _made_with(self.command)

    @property
    def tables(self) -> Tables:
        return Tables(self.unit, len(self.setups) > 1)

    def _size(self, nbytes: int) -> str:
        return format_bytes(nbytes, self.unit)

    def _setup(self, setup: Setup, top: int, scale: int, name: str) -> Iterator[str]:
        report = setup.report
        yield from self._heading(setup)
        if setup.timeline is not None:
            yield '<div class="picture">'
            yield from Picture(Areas(setup.timeline, top, self.unit), name, setup.tensors).lines()
            yield '<p class="m"><small>The axis counts allocations, not seconds.</small></p></div>'
        else:
            yield '<p class="m picture">There is no picture over time of this job.</p>'
        yield '<div class="rows">'
        yield from self.tables.rows(report, scale, name)
        yield '</div><div class="more">'
        yield from self.tables.tensors(setup)
        yield from self.tables.remedies(report)
        if setup.timeline is not None:
            yield from self.tables.phases(setup.timeline)
        text = styles.plain(box.render(report.model_copy(update={"assumptions": ()}), 80, self.unit))
        yield f'<details><summary>The box as text</summary><pre tabindex="0">{escape(text)}</pre></details>'
        if report.assumptions:
            yield f"<details{'' if len(self.setups) > 1 else ' open'}><summary>Assumptions</summary><ul>"
            yield from (f"<li>{escape(visible(line))}</li>" for line in assumption_lines(report.assumptions))
            yield "</ul></details>"
        yield "</div>"

    def _heading(self, setup: Setup) -> Iterator[str]:
        report = setup.report
        level = "h2" if len(self.setups) > 1 else "h1"
        count = f"{format_count(report.model.parameters.total)} parameters"
        about = [part for part in (count, trained(report), workload(report)) if part]
        yield f"<header><{level}>{escape(shown_name(setup.heading or report.model.name))}</{level}>"
        if setup.heading:
            about = [shown_name(report.model.name, 60), *about]
        yield f'<p class="m">{escape(visible(" · ".join(about)))}</p>'
        yield f'<p class="big">{self._size(report.peak.process_bytes)}</p>'
        yield (
            f"<p>at the peak ({escape(visible(report.peak.moment))}), the whole process; of it PyTorch allocates "
            f"{self._size(report.peak.allocated_bytes)}.</p>"
        )
        if (gpu := report.gpu) is not None:
            room, total = self._size(abs(gpu.free_bytes)), self._size(gpu.usable_bytes)
            said = f"✓ fits, {room} of {total} free" if gpu.fits else f"✗ does not fit, {room} more than its {total}"
            yield f'<p class="{"ok" if gpu.fits else "no"}"><b>{escape(visible(gpu.name))}: {said}</b></p>'
            if least := needs(report, self.unit):
                yield f'<p class="m">{escape(least)}</p>'
        if report.serving is not None:
            yield f"<p>Serves {escape(visible(served(report)))}.</p>"
        yield "</header>"


def _made_with(command: Sequence[str]) -> str:
    if not command:
        return ""
    return f'<h2>Made with</h2><pre class="command"><code>{escape(visible(" ".join(command)))}</code></pre>'
