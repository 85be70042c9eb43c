"""Regular expressions out of somebody else's file: only those that are done in a moment, whatever they meet.

Python's `re` tries alternatives one after another, so that `(a+)+b` takes years on thirty letters. How long a pattern
can take is bounded here from its text: repeats within repeats are refused, and few repeats may stand side by side.
"""

import re

LONGEST = 2000
"""Characters of a pattern."""

_PIECE = re.compile(
    r"(?P<escape>\\.)|(?P<set>\[\^?\]?(?:\\.|[^\]\\])*\])|(?P<open>\((?:\?(?:[imsxau]*\)|[imsxau]*:|[=!]|P<\w+>))?)"
    r"|(?P<close>\))|(?P<bar>\|)|(?P<repeat>(?:[*+]|\{\d*,\d*\}|\{\d+\})[?+]?)|(?P<maybe>\?[?+]?)|(?P<other>.)",
    re.DOTALL,
)

_MOST = 40**4 * 2**4
"""Bound of the tries: 40 for a repeat, of names that have some tens of letters, and 2 for what may be there or not."""


class SlowPattern(ValueError):
    """A pattern that could take too long, or that does more than memcalc looks through."""


def compiled(pattern: str) -> re.Pattern[str]:
    """`pattern`, ready to match names of modules.

    Raises:
        re.error: it is no regular expression.
        SlowPattern: matching it could take too long.
    """
    if len(pattern) > LONGEST:
        raise SlowPattern
    found = re.compile(pattern)
    if _tries(pattern) > _MOST:
        raise SlowPattern
    return found


def _tries(pattern: str) -> int:
    """An upper bound of the ways in which `pattern` can be tried at one place."""
    outer: list[tuple[int, int, int]] = []  # of each open group: tries of its parent, of its alternatives, their number
    here, others, branches = 1, 0, 1
    last = 1  # tries of the atom before a quantifier
    for piece in _PIECE.finditer(pattern):
        kind, text = piece.lastgroup, piece[0]
        if kind == "open":
            if text.endswith(")"):
                continue  # flags alone
            if text.startswith("(?") and text not in ("(?:", "(?=", "(?!") and "P<" not in text and ":" not in text:
                raise SlowPattern
            outer.append((here, others, branches))
            here, others, branches = 1, 0, 1
        elif kind == "bar":
            here, others, branches = 1, max(others, here), branches + 1
        elif kind == "close" and outer:
            last = max(others, here) * (2 if branches > 1 else 1)
            here, others, branches = outer.pop()
            here *= last
        elif kind == "repeat":
            if last > 1:
                raise SlowPattern  # a repeat of what can itself be tried in several ways
            here *= 40
            last = 40
        elif kind == "maybe":
            here *= 2
            last *= 2
        elif kind == "escape" and text[1].isdigit():
            raise SlowPattern  # a group that is matched again
        else:
            last = 1
        if here > _MOST:
            raise SlowPattern
    return max(others, here)
