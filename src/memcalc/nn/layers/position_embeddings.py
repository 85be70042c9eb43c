"""Position embeddings that are added to token embeddings: learned, or sinusoids in a table or a buffer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.nn.layers.linear import Embedding, check_length
from memcalc.nn.module import Buffer, Module, Parameter
from memcalc.nn.run_context import run_context
from memcalc.tables.dtypes import INT32, INT64, DType


class LearnedPositions(Embedding):
    """A learned table whose first rows are for padding."""

    def forward(self, ids: Tensor, positions: Tensor | None = None) -> Tensor:
        """Position vectors [b, s, h] for ids [b, s], or [1, s, h] where a decoder gives positions [s]."""
        _check(ids, positions, self.weight.shape[0] - 2)
        rows = ops.expand(token_range(ids), ids.shape[0], -1) if positions is None else ops.unsqueeze(positions, 0)
        return ops.embedding(ops.add_scalar(rows), self.weight)


class UnshiftedPositions(Embedding):
    """A learned table that begins with the first token."""

    def forward(self, ids: Tensor, positions: Tensor | None = None) -> Tensor:
        """Position vectors [s, h] for ids [b, s], or for what a decoder gives as positions [s]."""
        _check(ids, positions, self.weight.shape[0])
        return super().forward(token_range(ids) if positions is None else positions)


class FrozenTable(Module):
    """A table of positions that counts as a parameter but is not trained. No token embedding: adapters pass it over."""

    scope = "embedding"

    def __init__(self, count: int, width: int, *, dtype: DType | None = None) -> None:
        self.weight = Parameter(count, width, dtype=dtype, group="embedding")
        self.weight.trainable = False

    def forward(self, positions: Tensor) -> Tensor:
        """Positions [s] to vectors [s, h]."""
        return ops.embedding(positions, self.weight)


class FrozenPositions(FrozenTable):
    """Sinusoids in such a table."""

    def forward(self, ids: Tensor, positions: Tensor | None = None) -> Tensor:  # type: ignore[override]
        """Position vectors [s, h] for ids [b, s]."""
        _check(ids, positions, self.weight.shape[0])
        return super().forward(token_range(ids) if positions is None else positions)


class BufferedPositions(Module):
    """Sinusoids in a buffer, taken by given positions, or by such that leave out padding."""

    scope = "embedding"

    def __init__(self, count: int, width: int) -> None:
        self.weights = Buffer(count, width, dtype=None, group="embedding")

    def forward(self, ids: Tensor, positions: Tensor | None = None) -> Tensor:
        """Position vectors [b, s, h] for ids [b, s], or [1, s, h] for positions [1, s]."""
        positions = _counted(ids) if positions is None else ops.add_scalar(positions)
        batch, length = positions.shape
        chosen = ops.index_select(self.weights, ops.view(positions, -1))
        return ops.view(chosen, batch, length, -1)


def _check(ids: Tensor, positions: Tensor | None, longest: int) -> None:
    """No sequence is longer than the table; what a decoder has written so far is not known here."""
    if positions is None or run_context(ids).cache is None:
        check_length(ids, longest)


def token_range(ids: Tensor) -> Tensor:
    """0 to s - 1 for ids [b, s]."""
    return ids.tape.empty((ids.shape[1],), INT64)


def _counted(ids: Tensor) -> Tensor:
    """Positions [b, s] that count tokens, not padding."""
    mask = ops.to(ops.compare(ids), INT32)
    counted = ops.mul(ops.add_scalar(ops.to(ops.empty_like(mask, INT64), INT32)), mask)
    return ops.add_scalar(ops.to(counted, INT64))


KINDS: Final[Mapping[str, Callable[[int, int], Module]]] = {
    "learned": lambda count, width: LearnedPositions(count + 2, width),
    "unshifted": UnshiftedPositions,
    "frozen": FrozenPositions,
    "buffer": lambda count, width: BufferedPositions(count + 2, width),
}
"""By name, what makes positions for `count` tokens."""
