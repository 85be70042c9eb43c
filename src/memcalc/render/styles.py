"""Styled lines, and how they are written: plain, or with colours where the terminal shows them."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Span:
    """A run of text in one style; `style` is in Rich's words ("bold blue") and empty for plain text."""

    text: str
    style: str = ""


Line = tuple[Span, ...]


def plain(lines: Iterable[Line]) -> str:
    """The lines without their styles, each ended by a newline; spaces at the end of a line are kept."""
    return "".join("".join(span.text for span in line) + "\n" for line in lines)


def coloured(lines: Iterable[Line]) -> str:
    """The lines with the escape codes of their styles, in the 16 colours that every terminal has."""
    from rich.color import ColorSystem
    from rich.style import Style

    styles: dict[str, Style] = {}
    out = []
    for line in lines:
        for span in line:
            style = styles.setdefault(span.style, Style.parse(span.style))
            out.append(style.render(span.text, color_system=ColorSystem.STANDARD))
        out.append("\n")
    return "".join(out)
