"""Tables of keys, and reading a file's values by them: types, defaults, and what is left over."""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from memcalc.common.escaping import quoted
from memcalc.errors import ConfigError
from memcalc.run_configs.mapping import Given
from memcalc.run_configs.mapping import Mapping as RunMapping

TRUE = ("true", "yes", "t", "y", "1", "on")
FALSE = ("false", "no", "f", "n", "0", "off", "none", "null", "")
_VARIABLE = re.compile(r"\$[A-Za-z_{(]|`")
_SECRET = re.compile(r"token$|api_?key|secret|password|passwd|webhook|credential|_key$", re.IGNORECASE)
_NUMBER = re.compile(r"[+-]?(\d[\d_]{0,30})(\.\d{0,30})?([eE][+-]?\d{1,2})?|[+-]?\.\d{1,30}([eE][+-]?\d{1,2})?")
LARGEST = 2**50


class WrongTypeError(ValueError):
    """A value that its key cannot have; the text says what it needs."""


def whole(raw: Any) -> int:
    """A whole number, digits in a string too."""
    try:
        value = number(raw)
    except WrongTypeError:
        raise WrongTypeError("a whole number") from None
    if value != int(value) or not -LARGEST < value < LARGEST:
        raise WrongTypeError("a whole number")
    return int(value)


def count(raw: Any) -> int:
    """A whole number of at least one."""
    value = whole(raw)
    if value < 1:
        raise WrongTypeError("a whole number of at least 1")
    return value


def number(raw: Any) -> float:
    """A finite number, digits in a string too."""
    if isinstance(raw, str) and _NUMBER.fullmatch(raw.strip()):
        raw = float(raw.replace("_", ""))
    if isinstance(raw, bool) or not isinstance(raw, (int, float)) or abs(raw) > 1e30 or not math.isfinite(raw):
        raise WrongTypeError("a number")
    return float(raw)


def flag(raw: Any) -> bool:
    """True or false, in the spellings that HfArgumentParser takes."""
    if isinstance(raw, bool):
        return raw
    if isinstance(raw, int) and raw in (0, 1):
        return bool(raw)
    if isinstance(raw, str) and raw.strip().lower() in (*TRUE, *FALSE):
        return raw.strip().lower() in TRUE
    raise WrongTypeError("true or false")


def text(raw: Any) -> str:
    """A word or a path."""
    if isinstance(raw, bool):
        return str(raw).lower()
    if isinstance(raw, (str, int, float)):
        return str(raw).strip()
    raise WrongTypeError("text")


def names(raw: Any) -> list[str]:
    """Names: a list, or one text with commas or spaces."""
    if isinstance(raw, str):
        raw = raw.strip()
        if raw.startswith("["):
            raw = as_json(raw)
            return names(raw) if isinstance(raw, list) else [str(raw)]
        return [part for part in re.split(r"[,\s]+", raw) if part]
    if isinstance(raw, (list, tuple)) and all(isinstance(item, (str, int, float)) for item in raw):
        return [str(item) for item in raw]
    raise WrongTypeError("a list of names")


def mapping(raw: Any) -> dict[str, Any]:
    """A mapping, or a JSON text of one."""
    if isinstance(raw, str) and raw.strip().startswith("{"):
        raw = as_json(raw)
    if isinstance(raw, dict):
        return raw
    raise WrongTypeError("a mapping")


def anything(raw: Any) -> Any:
    """Whatever it is."""
    return raw


def as_json(raw: str) -> Any:
    """JSON inside a text; the text itself where it is none."""
    try:
        return json.loads(raw)
    except (ValueError, RecursionError):
        return raw


@dataclass(frozen=True)
class Key:
    """A key of a framework's file: what it means, our option, the default when absent, and the release it is of."""

    name: str
    kind: Callable[[Any], Any]
    absent: Any
    option: str
    meaning: str
    since: str = ""
    other: tuple[str, ...] = ()


def table(*rows: Key) -> dict[str, Key]:
    """Rows by name."""
    return {row.name: row for row in rows}


@dataclass
class Keys:
    """The values of one file or command line, read by a table of keys."""

    rows: Mapping[str, Key]
    values: dict[str, Any]
    where: str
    out: RunMapping
    harmless: Callable[[str], bool] = lambda name: False
    seen: set[str] = field(default_factory=set)

    def get(self, name: str) -> Given:
        """The value of a key, or its default. Raises ConfigError where it has the wrong type."""
        row = self.rows[name]
        for spelled in (name, *row.other):
            self.seen.add(spelled)
        for spelled in (name, *row.other):
            raw = self.values.get(spelled)
            if raw is not None and not (isinstance(raw, str) and raw.strip().lower() in ("null", "none")):
                return self._read(row, spelled, raw)
        return Given(name, row.absent, row.absent, True, row.meaning, row.option)

    def null(self, name: str) -> bool:
        """Whether the file says null for the key, in so many words."""
        spelled = [s for s in (name, *self.rows[name].other) if s in self.values]
        return bool(spelled) and all(str(self.values[s]).strip().lower() in ("none", "null") for s in spelled)

    def value(self, name: str) -> Any:
        """Just the value."""
        return self.get(name).value

    def has(self, name: str) -> bool:
        """Whether the file gives the key (not null)."""
        return not self.get(name).default

    def take(self, name: str, ours: Any = None, meaning: str = "") -> Given:
        """Read a key whose row names our option and set that option: to the value itself, or to `ours`."""
        given = self.get(name)
        self.out.take(given.option, given.value if ours is None else ours, given, meaning)
        return given

    def _read(self, row: Key, spelled: str, raw: Any) -> Given:
        if isinstance(raw, str) and _VARIABLE.search(raw) and row.kind is not anything:
            option = f"--{row.option.replace('_', '-')}" if row.option else f"{spelled}=VALUE after --"
            self.out.ask(
                f"{spelled} in {self.where} is {quoted(raw)}, which is not resolved: give {option}"
                if row.option != "model"
                else f"{spelled} in {self.where} is {quoted(raw)}, a variable: give --model PATH, ID or COUNT"
            )
            return Given(spelled, raw, row.absent, False, row.meaning, row.option)
        try:
            value = row.kind(raw)
        except WrongTypeError as problem:
            shown = "a value that is not shown" if _SECRET.search(spelled) else quoted(raw)
            raise ConfigError(f"{spelled} in {self.where} needs {problem}, not {shown}: correct it.") from None
        return Given(spelled, raw, value, False, row.meaning, row.option)

    def finish(self, dead: Mapping[str, str] | None = None) -> None:
        """Sort what was not asked for: dead keys, harmless ones, and those that nobody knows."""
        for name, raw in self.values.items():
            if name in self.seen:
                continue
            if dead and name in dead and raw is not None:
                self.out.drop(Given(name, raw, raw), dead[name])
            elif self.harmless(name) or (name in self.rows) or raw is None:
                self.out.ignored.append(name)
            else:
                self.out.unknown.append(name)
                near = difflib.get_close_matches(name, self.rows, 1, 0.75)
                if near:
                    self.out.assume(f"{name} is no key that memcalc knows: did you mean {near[0]}?")


def harmless(words: str, *patterns: str) -> Callable[[str], bool]:
    """Keys that do not change memory: exact names, and patterns of whole names."""
    exact = frozenset(words.split())
    found = re.compile("|".join(f"(?:{pattern})" for pattern in patterns)) if patterns else None

    def is_harmless(name: str) -> bool:
        return name in exact or bool(found and found.fullmatch(name))

    return is_harmless


def either(*tests: Callable[[str], bool]) -> Callable[[str], bool]:
    """A key that any of `tests` calls harmless."""
    return lambda name: any(test(name) for test in tests)


def first(given: Iterable[Given]) -> Given:
    """The first that is given, else the last."""
    last = None
    for one in given:
        if not one.default:
            return one
        last = one
    assert last is not None
    return last
