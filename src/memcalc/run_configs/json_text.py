"""JSON and TOML from outside. DeepSpeed reads hjson, so comments and trailing commas are taken out of JSON first."""

from __future__ import annotations

import json
import tomllib
from typing import Any, NoReturn

from memcalc.common.escaping import quoted
from memcalc.errors import ConfigError

DEEPEST = 64


def load_json(text: str, where: str) -> Any:
    """The value of a JSON text. Raises ConfigError where it is none, names a key twice or is too deep."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made: dict[str, Any] = {}
        for key, value in pairs:
            if key in made:
                raise ConfigError(f"{where} gives {quoted(key)} twice: keep one of them.")
            made[key] = value
        return made

    def constant(name: str) -> NoReturn:
        raise ConfigError(f"{where} holds {name}, which is no number: correct it.")

    _bounded(text, where)
    try:
        return json.loads(without_comments(text), object_pairs_hook=unique, parse_constant=constant)
    except json.JSONDecodeError as problem:
        raise ConfigError(
            f"{where} is no valid JSON at line {problem.lineno} ({problem.msg}): correct the file."
        ) from None
    except (RecursionError, ValueError):
        raise ConfigError(f"{where} holds a value that cannot be read: correct the file.") from None


def load_toml(text: str, where: str) -> dict[str, Any]:
    """The tables of a TOML text. Raises ConfigError."""
    _bounded(text, where)
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as problem:
        raise ConfigError(f"{where} is no valid TOML ({quoted(str(problem))[1:-1]}): correct the file.") from None
    except (RecursionError, ValueError):
        raise ConfigError(f"{where} holds a value that cannot be read: correct the file.") from None


def _bounded(text: str, where: str) -> None:
    depth = deepest = 0
    quote = escaped = False
    for c in text:
        if quote:
            quote, escaped = not (c == '"' and not escaped), c == "\\" and not escaped
        elif c == '"':
            quote = True
        elif c in "[{":
            depth += 1
            deepest = max(deepest, depth)
        elif c in "]}":
            depth -= 1
    if deepest > DEEPEST:
        raise ConfigError(f"{where} is nested more than {DEEPEST} levels deep: flatten it.")


def without_comments(text: str) -> str:
    """`text` without `//`, `#` and `/* */` comments and trailing commas; strings stay as they are."""
    out: list[str] = []
    place, end = 0, len(text)
    while place < end:
        c = text[place]
        if c == '"':
            stop = place + 1
            while stop < end and text[stop] != '"':
                stop += 2 if text[stop] == "\\" else 1
            out.append(text[place : stop + 1])
            place = stop + 1
        elif text.startswith("//", place) or c == "#":
            while place < end and text[place] != "\n":
                place += 1
        elif text.startswith("/*", place):
            stop = text.find("*/", place + 2)
            place = end if stop < 0 else stop + 2
        elif c in "]}":
            kept = len(out) - 1
            while kept >= 0 and out[kept].isspace():
                kept -= 1
            if kept >= 0 and out[kept] == ",":
                out[kept] = " "
            out.append(c)
            place += 1
        else:
            out.append(c)
            place += 1
    return "".join(out)
