"""Launch lines: the words of commands in a shell text, with what the text itself assigns. Nothing is run."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, field

from memcalc.errors import UsageError

_ASSIGNMENT = re.compile(r"(?:export\s+|local\s+|declare\s+)?([A-Za-z_][A-Za-z_0-9]*)=(.*)", re.DOTALL)
_REFERENCE = re.compile(r"\$\{([A-Za-z_]\w*)(?::?-([^}$`]*))?\}|\$([A-Za-z_]\w*)")
_EXPR = re.compile(r"\$\(\s*expr\s+(\d{1,9})\s*([-+*/]|\\\*)\s*(\d{1,9})\s*\)")
_ARITHMETIC = re.compile(r"\$\(\(\s*(\w{1,40})\s*([-+*/])\s*(\w{1,40})\s*\)\)")
_UNRESOLVED = re.compile(r"\$|`")
LONGEST = 100_000
"""Characters of one command."""


@dataclass
class Command:
    """One command: its words, and the assignments in front of it."""

    words: list[str]
    environment: dict[str, str] = field(default_factory=dict)


def commands(text: str, where: str) -> list[Command]:
    """The commands of a shell text, in order. Raises UsageError where the quotes do not close."""
    known: dict[str, str | None] = {}
    found: list[Command] = []
    for line in _joined_flags(logical_lines(text)):
        line = _expand(line, known)
        assigned = _ASSIGNMENT.fullmatch(line.strip())
        try:
            words = shlex.split(line, comments=False)
        except ValueError:
            continue
        environment: dict[str, str] = {}
        while words and (match := _ASSIGNMENT.fullmatch(words[0])) and match[1].isidentifier():
            environment[match[1]] = match[2]
            words = words[1:]
        if not words or (words[0] in ("export", "local", "declare") and all("=" in word for word in words[1:])):
            for word in [*(f"{k}={v}" for k, v in environment.items()), *words[1:]]:
                match = _ASSIGNMENT.fullmatch(word)
                if match:
                    _assign(known, match[1], match[2])
            continue
        if assigned is None or words:
            kept = {name: value for name, value in known.items() if name.isupper() and value is not None}
            found.append(Command(words, {**kept, **environment}))
    return found


def split(words: list[str], where: str) -> Command:
    """A command given as words (already split by the user's shell)."""
    if sum(map(len, words)) > LONGEST:
        raise UsageError(f"{where} is longer than {LONGEST:,} characters: give the launch line alone.")
    environment: dict[str, str] = {}
    while words and (match := _ASSIGNMENT.fullmatch(words[0])) and not words[0].startswith("-"):
        if "." in match[1] or match[1].islower():
            break
        environment[match[1]] = match[2]
        words = words[1:]
    return Command(words, environment)


def _assign(known: dict[str, str | None], name: str, value: str) -> None:
    value = value.strip()
    resolved = None if _UNRESOLVED.search(value) else value
    if name in known and known[name] != resolved:
        resolved = None
    known[name] = resolved


def _expand(line: str, known: dict[str, str | None]) -> str:
    def value(match: re.Match[str]) -> str:
        name = match[1] or match[3]
        if known.get(name) is not None:
            return str(known[name])
        if name not in known and match[2]:
            return match[2]
        return match[0]

    def calculated(match: re.Match[str]) -> str:
        operands = [known.get(word) or word for word in (match[1], match[3])]
        if not all(str(word).isdecimal() for word in operands) or (match[2] == "/" and int(operands[1]) == 0):
            return match[0]
        left, operator, right = int(operands[0]), match[2][-1], int(operands[1])
        return str({"+": left + right, "-": left - right, "*": left * right}.get(operator, left // max(right, 1)))

    pieces = re.split(r"('[^']*')", line)
    for place in range(0, len(pieces), 2):
        piece = _REFERENCE.sub(value, pieces[place])
        pieces[place] = _ARITHMETIC.sub(calculated, _EXPR.sub(calculated, piece))
    # a command substitution is one word, whatever stands in it
    return re.sub(r"\$\([^()]*\)", lambda m: m[0].replace(" ", "_").replace("'", "").replace('"', ""), "".join(pieces))


def logical_lines(text: str) -> list[str]:
    """Lines with continuations joined, comments gone, and quotes that span lines kept together."""
    lines: list[str] = []
    current: list[str] = []
    quote = ""
    place, end = 0, len(text)
    while place < end:
        c = text[place]
        if c == "\\" and quote != "'" and place + 1 < end:
            following = text[place + 1]
            skip = 3 if text.startswith("\\\r\n", place) else 2
            current.append(" " if following in "\r\n" else text[place : place + 2])
            place += skip if following in "\r\n" else 2
            continue
        if quote:
            quote = "" if c == quote else quote
        elif c in "'\"" and not (
            c == "'" and current and current[-1].isalnum() and place + 1 < end and text[place + 1].isalpha()
        ):
            quote = c
        elif c == "#" and (not current or current[-1].isspace()):
            while place < end and text[place] != "\n":
                place += 1
            continue
        elif c in "\n;" or (c in "&|" and text[place : place + 2] in ("&&", "||")):
            lines.append("".join(current))
            current = []
            place += 1
            continue
        current.append(c)
        place += 1
    lines.append("".join(current))
    if quote:  # a quote that never closes: take the text line by line
        return [line.split(" #")[0] for line in text.replace("\\\n", " ").splitlines()]
    return lines


def _joined_flags(lines: list[str]) -> list[str]:
    """Lines that are flags alone belong to the command above them (as issue texts write it)."""
    joined: list[str] = []
    for line in lines:
        bare = line.strip()
        if re.match(r"--?[A-Za-z]", bare) and joined and joined[-1].strip():
            joined[-1] += " " + bare
        else:
            joined.append(line)
    return joined


def options(words: list[str], *, single_dash: bool = False) -> tuple[dict[str, object], list[str]]:
    """Options of a command line as HfArgumentParser reads them, by name with underscores, and the other words.

    An option takes all words up to the next option: none means true, several are a list.
    """
    values: dict[str, object] = {}
    others: list[str] = []
    place = 0
    while place < len(words):
        word = words[place]
        place += 1
        if not is_option(word, single_dash):
            others.append(word)
            continue
        name, equals, value = word.partition("=")
        name = name.lstrip("-").replace("-", "_")
        if equals:
            values[name] = value
            continue
        taken: list[str] = []
        while place < len(words) and not is_option(words[place], single_dash):
            taken.append(words[place])
            place += 1
        values[name] = True if not taken else taken[0] if len(taken) == 1 else taken
    return values, others


def is_option(word: str, single_dash: bool = False) -> bool:
    """Whether a word names an option (a negative number does not)."""
    return bool(re.match(r"--?[A-Za-z]" if single_dash else r"--[A-Za-z]", word))
