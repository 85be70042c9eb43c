"""What became of a run file: a record that the modules of the frameworks fill in while they read."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from memcalc.common.escaping import printable

LONGEST_VALUE = 60
"""Characters of a value that are shown."""


@dataclass(frozen=True)
class Given:
    """The value of a key: as written, as understood, and whether it is the framework's default (the key is absent)."""

    key: str
    raw: Any
    value: Any
    default: bool = False
    meaning: str = ""
    option: str = ""

    @property
    def shown(self) -> str:
        """The value as text: short, on one line."""
        return shown(self.raw)


@dataclass(frozen=True)
class Mapped:
    """A key that counts: its value, our option (empty: it decides together with others), and what it means."""

    key: str
    value: Any
    option: str
    meaning: str
    default: bool
    ours: Any = None


@dataclass
class Mapping:
    """All that was read. `setup` has memcalc's options by name; sentences are whole, for a person."""

    framework: str = ""
    mode: str = "training"
    model: str | None = None
    setup: dict[str, Any] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    mapped: list[Mapped] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    dead: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    assumed: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    lacks: list[str] = field(default_factory=list)

    def take(self, option: str, ours: Any, given: Given | None = None, meaning: str = "") -> None:
        """Set an option; `given` is the key that it comes from."""
        self.setup[option] = ours
        if given is not None:
            self.mapped.append(
                Mapped(given.key, plain(given.raw), option, meaning or given.meaning, given.default, plain(ours))
            )

    def note(self, given: Given, meaning: str = "") -> None:
        """A key that counts but sets no option by itself."""
        self.mapped.append(Mapped(given.key, plain(given.raw), "", meaning or given.meaning, given.default))

    def assume(self, sentence: str) -> None:
        """Something that was taken for granted."""
        if sentence not in self.assumed:
            self.assumed.append(sentence)

    def ask(self, sentence: str) -> None:
        """Something that no file says and that an estimate needs."""
        if sentence not in self.asked:
            self.asked.append(sentence)

    def lack(self, sentence: str) -> None:
        """Something that memcalc has no option for."""
        if sentence not in self.lacks:
            self.lacks.append(sentence)

    def drop(self, given: Given, why: str) -> None:
        """A key that is given and has no effect."""
        if not given.default:
            self.dead.append(f"{given.key}: {given.shown} has no effect: {why}")


def plain(value: Any) -> Any:
    """`value` as JSON has it, texts cut."""
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, str):
        return shown(value)
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in list(value)[:64]]
    if isinstance(value, dict):
        return {shown(str(key)): plain(item) for key, item in list(value.items())[:64]}
    return shown(str(value))


def shown(value: Any) -> str:
    """`value` as text on one line, at most `LONGEST_VALUE` characters."""
    if value is None:
        text = "null"
    elif isinstance(value, bool):
        text = str(value).lower()
    elif isinstance(value, (list, tuple)):
        text = ",".join(shown(item) for item in list(value)[:16])
    elif isinstance(value, dict):
        text = "{" + ", ".join(f"{shown(k)}: {shown(v)}" for k, v in list(value.items())[:8]) + "}"
    else:
        text = printable(str(value))
    return text if len(text) <= LONGEST_VALUE else text[: LONGEST_VALUE - 3] + "..."
