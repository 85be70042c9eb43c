"""Text that fits: names made harmless, columns measured in terminal cells, words wrapped."""

from memcalc.common.escaping import printable

_ASCII = str.maketrans(
    {"·": "-", "×": "x", "–": "-", "—": "-", "…": "...", "≤": "<=", "≥": ">=", "→": "->", "’": "'", "“": '"', "”": '"'}
)


def visible(text: str, unicode: bool = True) -> str:
    """`text` on one line, without anything that a terminal would obey: such characters are written as escapes.

    Names come from files and from the Hub, so they are data. Without `unicode` the result is ASCII.
    """
    clean = printable(text)
    return clean if unicode else clean.translate(_ASCII).encode("ascii", "backslashreplace").decode()


def encodable(text: str, encoding: str | None, errors: str | None) -> str:
    """`text` as a stream of this encoding can write it: unchanged where it can, else in ASCII as far as needed."""
    try:
        text.encode(encoding or "utf-8", errors or "strict")
    except (UnicodeEncodeError, LookupError):
        return text.translate(_ASCII).encode("ascii", "backslashreplace").decode()
    return text


def cells(text: str) -> int:
    """Columns that a terminal needs for `text`: East Asian characters take two, combining marks none."""
    return len(text) if text.isascii() else sum(map(_cells_of, text))


def _cells_of(character: str) -> int:
    if character < "\u0300" or "\u2500" <= character <= "\u259f":  # Latin, box drawing, blocks
        return 1
    import unicodedata  # for the few names that need it

    if unicodedata.category(character) in ("Mn", "Me"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def clip(text: str, width: int, unicode: bool = True) -> str:
    """`text` in at most `width` columns; what is too long ends in an ellipsis."""
    if cells(text) <= width:
        return text
    ellipsis = ("…" if unicode else "...")[: max(width, 0)]
    kept, used = "", cells(ellipsis)
    for character in text:
        used += _cells_of(character)
        if used > width:
            break
        kept += character
    return kept + ellipsis


def left(text: str, width: int, unicode: bool = True) -> str:
    """`text` in exactly `width` columns, aligned to the left."""
    text = clip(text, width, unicode)
    return text + " " * (width - cells(text))


def right(text: str, width: int, unicode: bool = True) -> str:
    """`text` in exactly `width` columns, aligned to the right."""
    text = clip(text, width, unicode)
    return " " * (width - cells(text)) + text


def wrap(text: str, width: int) -> list[str]:
    """`text` in lines of at most `width` columns, broken between words, and within a word longer than a line."""
    lines = [""]
    for word in text.split():
        room = width - cells(lines[-1]) - 1
        if lines[-1] and cells(word) <= room:
            lines[-1] += " " + word
            continue
        if lines[-1]:
            lines.append("")
        for character in word:
            if cells(lines[-1]) + _cells_of(character) > width:
                lines.append("")
            lines[-1] += character
    return lines
