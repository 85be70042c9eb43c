"""The shapes of a file's tensors, asked by name."""

from collections.abc import Collection, Iterator, Mapping
from functools import cached_property


class Unfit(Exception):
    """A tensor that a family has is not there, or has a shape that the family cannot have."""


class Shapes:
    """Shapes by name. What is asked for and is not there raises Unfit."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._shapes = shapes

    def __contains__(self, name: str) -> bool:
        return name in self._shapes

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def of(self, name: str, dimensions: int | None = None) -> tuple[int, ...]:
        """The shape of a tensor, which has so many dimensions and no empty one."""
        shape = self._shapes.get(name)
        if shape is None or not all(shape) or len(shape) != (dimensions or len(shape)):
            raise Unfit(name)
        return shape

    def first(self, *names: str) -> tuple[int, ...]:
        """The shape of the first of the names that is there."""
        return self.of(next((name for name in names if name in self), names[0]))

    def has_any(self, names: Collection[str]) -> bool:
        """Whether one of the names is there."""
        return any(name in self for name in names)

    def count(self, stack: str) -> int:
        """How many modules `stack` numbers: `blocks.0.` to `blocks.39.` are 40."""
        return self._counts.get(stack, 0)

    @cached_property
    def _counts(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for name in self._shapes:
            parts = name.split(".")
            for place, part in enumerate(parts):
                if part.isdecimal() and place and len(part) < 6:
                    stack = ".".join(parts[:place])
                    found[stack] = max(found.get(stack, 0), int(part) + 1)
        return found


def quotient(whole: int, part: int) -> int:
    """How often `part` goes into `whole`. Raises Unfit where it does not."""
    if part <= 0 or whole % part:
        raise Unfit(f"{whole} / {part}")
    return whole // part
