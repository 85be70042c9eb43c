"""Bytes of a tensor as a product of the model's own numbers: batch, seq_len, and the keys of its config.json."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

from memcalc.common.sizes import ALIGNMENT, Shape

_NOT_SIZES = ("_id", "position", "layer", "version", "window", "max_", "beams", "seed", "interval", "chunk")
"""What the keys of numbers have in their names that are no sizes of tensors."""

_FIRST = ("vocab_size", "hidden_size", "d_model", "n_embd", "intermediate_size", "d_ff", "ffn_dim",
          "num_attention_heads", "n_head", "num_key_value_heads", "head_dim")  # fmt: skip
"""Keys that explain a number before others do."""

_MOST_TIMES = 8
"""The largest number that a size is multiplied by in a formula."""


@dataclass(frozen=True)
class Formula:
    """An arithmetic expression with the values of its names: `round_up(n, m)` is the next multiple of m."""

    expression: str
    numbers: Mapping[str, int | float] = field(default_factory=dict)


Depends = tuple[frozenset[str], ...]
"""For each dimension of a tensor the lengths that it depends on, of batch and seq_len."""


def literal(nbytes: int) -> Formula:
    """A number of bytes that is not made of others here."""
    return Formula(str(nbytes))


class Sizes:
    """The numbers of a job by name: what its formulas are made of."""

    def __init__(self, lengths: Mapping[str, int], config: Mapping[str, Any]) -> None:
        self.lengths = {name: value for name, value in lengths.items() if value > 1}
        self._all_lengths = lengths
        self.config = _ordered(dict(_numbers(config)))
        self._known: dict[object, Formula] = {}

    def formula(
        self, shape: Shape, itemsize: int, *, weight: bool = False, times: int = 1, depends: Depends | None = None
    ) -> Formula:
        """The bytes that the allocator takes for a tensor, `times` over.

        A weight has no batch and no length in it; of others `depends` says which dimension has, where that is known.
        """
        depends = (frozenset[str](),) * len(shape) if weight else depends
        key = shape, itemsize, times, depends
        if key not in self._known:
            self._known[key] = self._made(shape, itemsize, times, depends)
        return self._known[key]

    def _made(self, shape: Shape, itemsize: int, times: int, depends: Depends | None) -> Formula:
        numbers: dict[str, int] = {}
        factors: list[str] = []
        for place, size in enumerate(shape):
            if depends is None:
                factors += self._guessed(size, place, numbers)
            else:
                factors += self._told(size, depends[place], numbers)
        raw = prod(shape) * itemsize
        product = " * ".join([*factors, str(itemsize)])
        rest = f" * {times}" if times != 1 else ""
        if raw % ALIGNMENT:
            return Formula(f"round_up({product}, {ALIGNMENT}){rest}", numbers)
        return Formula(product + rest, numbers)

    def _told(self, size: int, lengths: frozenset[str], numbers: dict[str, int]) -> list[str]:
        """The factors of a dimension that depends on these lengths and no others; names join `numbers`."""
        factors: list[str] = []
        for name in sorted(lengths):
            length = self._all_lengths[name]
            if size % length:
                return [*factors, str(size)]
            factors.append(name)
            numbers[name] = length
            size //= length
        return factors + self._named(size, list(self.config.items()), numbers)

    def _guessed(self, size: int, place: int, numbers: dict[str, int]) -> list[str]:
        """The factors of a dimension of which it is not known what it depends on: the first is most often the batch."""
        known = [*self.lengths.items(), *self.config.items()]
        known.sort(key=lambda pair: (pair[0] == "batch") != (place == 0))
        free = [pair for pair in known if pair[0] not in numbers or pair[0] not in self.lengths]
        return self._named(size, free, numbers)

    def _named(self, size: int, free: list[tuple[str, int]], numbers: dict[str, int]) -> list[str]:
        """The names and numbers whose product is `size`."""
        if size == 1:
            return []
        for name, value in free:
            if value == size:
                numbers[name] = value
                return [name]
        for index, (name, value) in enumerate(free):
            for other, second in free[index + 1 :]:
                if value * second == size:
                    numbers |= {name: value, other: second}
                    return [name, other]
        for name, value in free:
            if size % value == 0 and 1 < size // value <= _MOST_TIMES:
                numbers[name] = value
                return [str(size // value), name]
        return [str(size)]


def _numbers(config: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, int]]:
    """The whole numbers of a config that can be sizes, those of its parts too; inner keys keep their names alone where
    nobody else has them.
    """
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, "" if key == "text_config" else key.removesuffix("_config") + "_")
        elif type(value) is int and value > 1 and str(key).isidentifier() and not any(no in key for no in _NOT_SIZES):
            yield prefix + key, value
    heads, width = config.get("num_attention_heads"), config.get("hidden_size")
    if type(heads) is int and type(width) is int and "head_dim" not in config and heads and width % heads == 0:
        yield prefix + "head_dim", width // heads


def _ordered(numbers: dict[str, int]) -> dict[str, int]:
    first = {name: numbers[name] for name in _FIRST if name in numbers}
    return first | numbers
