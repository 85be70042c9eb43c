"""Which modules get an adapter, and of which rank: PEFT's rules for names, patterns, layers and exceptions.

Source: check_target_module_exists in peft/tuners/tuners_utils.py and get_pattern_key in peft/utils/other.py, PEFT 0.21.
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from dataclasses import dataclass

from memcalc.errors import UsageError
from memcalc.nn.module import Module
from memcalc.nn.module_paths import matches, split_names
from memcalc.nn.stack import Stack

_LAYER = re.compile(r".*?\.[^.]*\.(\d+)\.")
"""The first number in a module's path is that of its layer."""


@dataclass(frozen=True)
class Selection:
    """What the LoRA options say about names: None where an option is not given.

    `targets` and `exclude` are names with commas, or one regular expression for the whole path. `layers` are positions,
    such as "0,4-7"; `ranks` are patterns with ranks of their own, such as "q_proj=32,.*mlp.*=8".
    """

    rank: int
    targets: str | None = None
    exclude: str | None = None
    layers: str | None = None
    ranks: str | None = None

    def __post_init__(self) -> None:
        """Raise UsageError for a pattern or a list that is none, and for layers that PEFT would pass over."""
        for option, text in (("--lora-targets", self.targets), ("--lora-exclude-modules", self.exclude)):
            if text is not None and is_pattern(text):
                _compiled(text, option)
        self.positions()
        self.rank_patterns()
        if self.layers is not None and self.targets is not None:
            if is_pattern(self.targets):
                raise UsageError(
                    "PEFT has no layers_to_transform beside a regular expression for target_modules; name the layers "
                    "in --lora-targets, or give names there."
                )
            if self.targets.lower() == "all-linear":
                raise UsageError(
                    "PEFT passes over layers_to_transform where target_modules is all-linear; name the modules with "
                    "--lora-targets, such as q_proj,v_proj, or leave out --lora-layers-to-transform."
                )

    def positions(self) -> frozenset[int] | None:
        """The layers that get adapters; None for all."""
        if self.layers is None:
            return None
        found: set[int] = set()
        for part in split_names(self.layers):
            first, dash, last = part.partition("-")
            if not first.isdecimal() or (dash and not last.isdecimal()):
                raise UsageError(f"--lora-layers-to-transform needs positions such as 0,1 or 0-7, not {self.layers!r}.")
            found |= set(range(int(first), int(last or first) + 1)) if int(last or first) < 10**5 else set()
        if not found:
            raise UsageError("--lora-layers-to-transform names no layer; give positions such as 0-7, or leave it out.")
        return frozenset(found)

    def rank_patterns(self) -> dict[str, int]:
        """Patterns of paths with their ranks, in order."""
        found: dict[str, int] = {}
        for part in (self.ranks or "").split(",") if self.ranks is not None else ():
            pattern, _, rank = part.strip().rpartition("=")
            if not pattern or not rank.isdecimal() or not int(rank):
                raise UsageError(
                    f"--lora-rank-pattern needs patterns and ranks such as q_proj=32,o_proj=8, not {self.ranks!r}."
                )
            _compiled(pattern, "--lora-rank-pattern")
            found[pattern] = int(rank)
        return found

    def rank_of(self, path: str) -> int:
        """The rank of an adapter on the module at `path`."""
        for pattern, rank in self.rank_patterns().items():
            if re.match(rf"(.*\.)?({pattern})$", path):
                return rank
        return self.rank

    def allows(self, path: str) -> bool:
        """Whether exceptions and layers leave the module at `path` its adapter."""
        if self.exclude is not None and _named(self.exclude, path):
            return False
        positions = self.positions()
        if positions is None:
            return True
        layer = _LAYER.match(path)
        return layer is not None and int(layer[1]) in positions

    @property
    def by_layer(self) -> bool:
        """Whether layers of one kind may be told apart by it."""
        numbered = any(re.search(r"\d|\\d|\*", text or "") for text in (self.targets, self.exclude, self.ranks))
        return self.layers is not None or numbered

    def mark(self, path: str) -> Hashable:
        """What tells a module from another of its kind in another layer."""
        named = self.targets is None or self.targets.lower() == "all-linear" or _named(self.targets, path)
        return (named and self.allows(path), self.rank_of(path) if named else 0)


def is_pattern(text: str) -> bool:
    """Whether targets are a regular expression rather than names."""
    return re.search(r"[*+?()\[\]|^$\\{}]", text) is not None


def _named(text: str, path: str) -> bool:
    if is_pattern(text):
        return re.fullmatch(text, path) is not None
    return matches(path, split_names(text))


def _compiled(text: str, option: str) -> None:
    try:
        re.compile(text)
    except re.error as problem:
        raise UsageError(f"{option} is no regular expression ({problem.msg}): {text!r}; correct it.") from None


def tell_layers_apart(network: Module, selection: Selection) -> None:
    """Split stacks whose layers do not all get the same adapters; call it before anything is done to the blocks."""
    if not selection.by_layer:
        return
    for path, stack in network.modules():
        if isinstance(stack, Stack) and not stack.shared:
            stack.split(
                [
                    tuple(selection.mark(f"{path}.{position}.{name}") for name, _ in block.modules() if name)
                    for position, block in stack.positions
                ]
            )
