"""Weights as an optimizer sees them, and the scratch memory of its step.

The step of an optimizer is written as its source is, on pieces of memory that live as long as something refers to
them: a name keeps its piece until it is bound to the next one, so that what one weight leaves behind is alive while
the next is updated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from memcalc.common.sizes import Shape, rounded

_OUTER = frozenset({"embedding", "LM head", "head"})


@dataclass(frozen=True)
class Weight:
    """A trained weight: shape, bytes per element, how many of it there are, and its group in the model.

    `rank` is that of a projected gradient (GaLore).
    """

    shape: Shape
    itemsize: int
    copies: int = 1
    group: str = "other"
    rank: int = 128
    wide_states: bool = False
    """Keep its optimizer states in 32 bits where others have 8 (Trainer registers every nn.Embedding so)."""
    card: int = 0
    """The GPU that it lies on, where one process uses several."""

    @property
    def count(self) -> int:
        """Elements of one such weight."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of one such weight, or of a tensor like it."""
        return self.sized()

    @property
    def is_hidden_matrix(self) -> bool:
        """Whether it is a matrix of a hidden layer: no vector, no embedding, no head."""
        return len(self.shape) == 2 and self.group not in _OUTER

    def sized(self, itemsize: int | None = None) -> int:
        """Bytes of a tensor of its shape with elements of `itemsize` bytes."""
        return rounded(self.count * (itemsize or self.itemsize))

    def rows(self, itemsize: int | None = None) -> int:
        """Bytes of one statistic per row of its matrices."""
        return rounded(prod(self.shape[:-1]) * (itemsize or self.itemsize))

    def columns(self, itemsize: int | None = None) -> int:
        """Bytes of one statistic per column of its matrices."""
        return rounded(prod(self.shape[:-2]) * self.shape[-1] * (itemsize or self.itemsize))


SCALAR = 512
"""Bytes that the allocator takes for a tensor of one element."""

States = Callable[[Weight], Mapping[str, int]]
Reduction = Callable[[Shape], Sequence[int]]
"""Bytes of the pieces that a kernel allocates while it reduces the rows of a matrix of that shape to one."""


class ScratchBuffer:
    """Scratch memory, freed when nothing refers to it."""

    __slots__ = ("nbytes", "number", "scratch")

    def __init__(self, scratch: Scratch, nbytes: int) -> None:
        self.scratch = scratch
        self.nbytes = nbytes
        self.number = scratch.count
        scratch.count += 1
        scratch.codes.append(nbytes)
        scratch.live += nbytes
        scratch.peak = max(scratch.peak, scratch.live)

    def __del__(self) -> None:
        self.scratch.codes.append(~self.number)
        self.scratch.live -= self.nbytes


class Scratch:
    """What one optimizer step has allocated besides weights, gradients and states.

    `codes` are its requests and frees in order: bytes of a request, and ~n where the n-th request is freed.
    """

    __slots__ = ("codes", "count", "live", "peak", "reduction")

    def __init__(self, reduction: Reduction | None = None) -> None:
        self.reduction = reduction
        """What the GPU's reductions allocate of their own; None leaves that out."""
        self.live = 0
        self.peak = 0
        self.count = 0
        self.codes: list[int] = []

    def new(self, nbytes: int, stream: int = 0) -> ScratchBuffer:
        """A piece of `nbytes` bytes; streams make no difference here."""
        return ScratchBuffer(self, nbytes)

    def like(self, weight: Weight, itemsize: int | None = None) -> ScratchBuffer:
        """A piece as large as `weight`, with elements of `itemsize` bytes where given."""
        return ScratchBuffer(self, weight.sized(itemsize))

    def reduce_rows(self, weight: Weight) -> None:
        """What PyTorch's kernel allocates while it reduces the rows of a matrix to one (dim=-2)."""
        if self.reduction is not None and len(weight.shape) == 2:
            pieces = [self.new(rounded(nbytes)) for nbytes in self.reduction(weight.shape)]
            del pieces

    def scalar(self) -> ScratchBuffer:
        """One element."""
        return ScratchBuffer(self, SCALAR)

    def likes(self, weights: Sequence[Weight]) -> list[ScratchBuffer]:
        """A list with a piece like every weight (foreach)."""
        return self.each(weights, Weight.sized)

    def each(self, weights: Sequence[Weight], size: Callable[[Weight], int]) -> list[ScratchBuffer]:
        """A list with a piece of `size` bytes for every weight."""
        return [self.new(size(weight) * weight.copies) for weight in weights]


class Temporaries:
    """What a step allocates, by the weights in the order of their updates."""

    def __init__(self, step: Callable[[Scratch, Sequence[Weight]], object]) -> None:
        self.step = step

    def __call__(self, weights: Sequence[Weight], reduction: Reduction | None = None) -> int:
        """The most that is alive at once; with the scratch of kernels where `reduction` is known."""
        return self._run(weights, reduction).peak

    def codes(self, weights: Sequence[Weight], reduction: Reduction | None = None) -> list[int]:
        """The requests and frees in order (`Scratch.codes`), of weights that stand for themselves alone."""
        return self._run(weights, reduction).codes

    def _run(self, weights: Sequence[Weight], reduction: Reduction | None) -> Scratch:
        scratch = Scratch(reduction)
        self.step(scratch, weights)
        return scratch


def _nothing(scratch: Scratch, weights: Sequence[Weight]) -> None:
    return


nothing = Temporaries(_nothing)
"""A step in place: no scratch memory."""


def by_dtype(weights: Sequence[Weight]) -> list[list[Weight]]:
    """The weights in the groups that foreach works on, one after another.

    PyTorch sorts them into a hash table of the C++ library, which lists first what was put in last.
    """
    groups: dict[int, list[Weight]] = {}
    for weight in weights:
        groups.setdefault(weight.itemsize, []).append(weight)
    return list(reversed(groups.values()))
