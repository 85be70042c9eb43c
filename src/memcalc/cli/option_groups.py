"""Options that several commands share, as one argument of each."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from inspect import Parameter
from typing import Any

from memcalc.errors import option_name


@dataclass(frozen=True)
class Group:
    """Options that a command's function gets as its keyword argument `name`: what `read` makes of their values."""

    name: str
    options: Callable[[], Sequence[Parameter]]
    read: Callable[[Mapping[str, Any]], Any]


_OTHER_NAMES = {"head": "task", "of_run": "model"}
"""Parameters whose option has another name."""


def spelt(name: str) -> str:
    """The option of the parameter `name`."""
    return option_name(_OTHER_NAMES.get(name, name))


def is_named(name: str, words: Collection[str]) -> bool:
    """Whether words of a command line name the option of the parameter `name`, or its opposite."""
    option = spelt(name)
    return option in words or f"--no-{option[2:]}" in words
