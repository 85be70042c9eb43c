"""Optimizers: what each keeps between steps, and what its step allocates on top. One row an optimizer.

States and temporaries depend on the shapes of the weights and on the implementation, so a row holds two functions of
them. Sizes are bytes as the allocator takes them (rounded up to 512). Source: torch/optim of PyTorch 2.14.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from memcalc.errors import UsageError, close_matches
from memcalc.model.tensor import Shape, rounded


@dataclass(frozen=True, slots=True)
class Weight:
    """A trained weight as an optimizer sees it: shape, bytes per element, and how many of it there are in a row."""

    shape: Shape
    itemsize: int
    copies: int = 1

    @property
    def nbytes(self) -> int:
        """Bytes of one such weight, or of a tensor like it."""
        return rounded(prod(self.shape) * self.itemsize)


States = Callable[[Weight], Mapping[str, int]]
Temporaries = Callable[[Sequence[Weight]], int]


@dataclass(frozen=True, slots=True)
class Optimizer:
    """One optimizer: `states` gives the bytes kept for a weight by name of state, `step` the most that a step adds.

    `step` has a function for each implementation that exists.
    """

    name: str
    states: States
    step: Mapping[str, Temporaries]
    source: str
    counter_on_device: tuple[str, ...] = ()
    """Implementations that keep each weight's step counter on the GPU (512 bytes each)."""


def _like(*names: str) -> States:
    """States as large as the weight, in its dtype."""
    return lambda weight: {name: weight.nbytes for name in names}


def _nothing(weights: Sequence[Weight]) -> int:
    return 0


def _one_list(weights: Sequence[Weight]) -> int:
    """A list with one tensor per weight (foreach)."""
    return sum(weight.nbytes * weight.copies for weight in weights)


def _neighbours(weights: Iterable[Weight]) -> Iterable[tuple[Weight | None, Weight]]:
    """Each weight with the one that was updated before it."""
    previous = None
    for weight in weights:
        yield previous, weight
        previous = weight


def _adamw_loop(weights: Sequence[Weight]) -> int:
    """The previous weight's denominator is still bound while root and quotient of this one's are made."""
    return max((0 if a is None else a.nbytes) + 2 * b.nbytes for a, b in _neighbours(weights))


def _adafactor_states(weight: Weight) -> Mapping[str, int]:
    """Row and column statistics of a matrix; the full variance of a vector."""
    if len(weight.shape) < 2:
        return {"variance": weight.nbytes}
    return {"row statistics": _row(weight), "column statistics": _column(weight)}


def _row(weight: Weight) -> int:
    return rounded(prod(weight.shape[:-1]) * weight.itemsize)


def _column(weight: Weight) -> int:
    return rounded(prod(weight.shape[:-2]) * weight.shape[-1] * weight.itemsize)


def _adafactor_loop(weights: Sequence[Weight]) -> int:
    """Statistics and estimate of one weight; the names of the last matrix and vector keep theirs until rebound."""
    best = 0
    held = {"row": 0, "column": 0, "estimate": 0, "squared": 0}
    for _, weight in _neighbours(weights):
        live = sum(held.values())
        if len(weight.shape) > 1:
            best = max(best, live + _row(weight))
            held["row"] = _row(weight)
            best = max(best, sum(held.values()) + _column(weight))
            held["column"] = _column(weight)
            best = max(best, sum(held.values()) + weight.nbytes + 512)  # and the mean of the row statistics
        else:
            best = max(best, live + weight.nbytes)
            held["squared"] = weight.nbytes
            best = max(best, sum(held.values()) + weight.nbytes)
        held["estimate"] = weight.nbytes
        best = max(best, sum(held.values()) + 512)
    return best


def _adafactor_foreach(weights: Sequence[Weight]) -> int:
    """All matrices at once, then all vectors; the first group's updates stay bound while the second works."""
    best = held = 0
    groups: dict[bool, list[Weight]] = {}
    for weight in weights:
        groups.setdefault(len(weight.shape) > 1, []).append(weight)
    for is_matrix, group in groups.items():
        total, count = _one_list(group), sum(weight.copies for weight in group)
        rows = sum(_row(weight) * weight.copies for weight in group) if is_matrix else total
        columns = sum(_column(weight) * weight.copies for weight in group) if is_matrix else total
        best = max(best, held + rows, held + columns, held + total, total + (512 * count if is_matrix else 512))
        held = total
    return best


_TORCH = "torch.optim of PyTorch 2.14"

OPTIMIZERS = {
    row.name: row
    for row in (
        Optimizer(
            "adamw", _like("momentum", "variance"),
            {"foreach": _one_list, "for-loop": _adamw_loop, "fused": _nothing}, _TORCH, ("fused",),
        ),
        Optimizer("sgd", _like(), {"foreach": _nothing, "for-loop": _nothing, "fused": _nothing}, _TORCH),
        Optimizer("sgd-momentum", _like("momentum"), {"foreach": _nothing, "for-loop": _nothing, "fused": _nothing}, _TORCH),
        Optimizer("adafactor", _adafactor_states, {"foreach": _adafactor_foreach, "for-loop": _adafactor_loop}, _TORCH),
    )
}  # fmt: skip


def optimizer(name: str) -> Optimizer:
    """The optimizer of this exact name. Raises UsageError, which names the close matches."""
    try:
        return OPTIMIZERS[name]
    except KeyError:
        raise UsageError(
            f"optimizer {name!r} is not known{close_matches(name, OPTIMIZERS)}; `memcalc optimizers` lists them."
        ) from None
