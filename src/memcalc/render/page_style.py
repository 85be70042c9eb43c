"""The style of a page: `page.css`, and the colours of the rows."""

from importlib.resources import files

from memcalc.render.areas import COLOURS, INKS

AROUND = "html{background:#fff}body{margin:0}@media(prefers-color-scheme:dark){html{background:#0d1117}}"
"""What a page of its own needs besides."""


def style() -> str:
    """All of it."""
    colours = zip(COLOURS, INKS, strict=True)
    rows = "".join(f".memcalc .r{row}{{--c:{colour};--i:{ink}}}\n" for row, (colour, ink) in enumerate(colours))
    return rows + files("memcalc.render").joinpath("page.css").read_text(encoding="utf-8")
