"""Loops over the pieces of a tensor, run for a few of them and accounted for all.

A loop over images or windows cuts its inputs into pieces, does the same with each, and puts what comes out together.
Its pieces are given as lengths, and repetitions of them. Of a repetition the first and the last are run, and in between
one piece of each length stands for all. What is alive changes by the same bytes with every piece of a length, forward
and backward, so that no peak lies strictly between the ends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from memcalc import ops
from memcalc.autograd.tensor import Tensor


class Repeat(NamedTuple):
    """The pieces of `body`, `times` times."""

    body: Sequence[int | Repeat]
    times: int


Lengths = Sequence[int | Repeat]
"""How long the pieces are, in order."""


def each_piece(
    run: Callable[..., Tensor], lengths: Lengths, tensors: Sequence[Tensor], dim: int, joined: int = 1
) -> list[Tensor]:
    """What `run` makes of the pieces of `tensors` along `dim`; its own results follow each other along `joined`."""
    few = list(_few(lengths))
    pieces = [ops.split(tensor, [length * count for length, count in few], dim) for tensor in tensors]

    def one(count: int, *piece: Tensor) -> Tensor:
        """Run one piece, or the first of `count` for all of them."""
        if count == 1:
            return run(*piece)
        with piece[0].tape.standing_for(count):
            return ops.as_many(run(*(ops.first_of(tensor, dim, count) for tensor in piece)), joined, count)

    return [one(count, *piece) for (_, count), *piece in zip(few, *pieces, strict=True)]


def _few(lengths: Lengths) -> Iterator[tuple[int, int]]:
    """Lengths in order, each with how many pieces it stands for."""
    for item in lengths:
        if isinstance(item, int):
            yield item, 1
            continue
        body = list(_few(item.body))
        yield from body * min(item.times, 1)
        if item.times > 2:
            every = Counter[int]()
            for length, count in body:
                every[length] += count
            yield from ((length, count * (item.times - 2)) for length, count in every.items())
        yield from body * (item.times > 1)
