"""Names that come from files and from the Hub are data: how a message may show one."""

import os

from memcalc.common.escaping import printable

LONGEST_SHOWN = 120


def shown(name: object) -> str:
    """`name` on one line, safe to print: anything that is not a printable character is written as an escape.

    A tensor or file may be called `"\\x1b[2J"`; in a message it must neither clear the screen nor start a new line.
    Long names are cut in the middle, because their ends tell them apart.
    """
    text = printable(str(name))
    if len(text) <= LONGEST_SHOWN:
        return text
    half = LONGEST_SHOWN // 2
    return f"{text[:half]}…{text[-half:]}"


def some(names: list[str], limit: int = 3) -> str:
    """The first few of `names`, and how many more there are."""
    text = ", ".join(shown(name) for name in names[:limit])
    return f"{text} and {len(names) - limit:,} more" if len(names) > limit else text


def short_name(path: str) -> str:
    """What to call the model at `path`: its folder's name, or the file's own where it is not called config.json."""
    whole = os.path.abspath(path)
    if os.path.basename(whole) == "config.json":
        whole = os.path.dirname(whole)
    return os.path.basename(whole) or "model"
