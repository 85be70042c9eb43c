"""Scratch memory of optimizers outside torch.optim.

Sources: transformers 5.24 (optimization.py, Adafactor), lion-pytorch 0.2, galore-torch 1.0, schedulefree 1.4,
torchdistx (AnyPrecisionAdamW), lomo-optim 0.1.
"""

from __future__ import annotations

from collections.abc import Sequence

from memcalc.common.sizes import rounded
from memcalc.optim.weight import Scratch, ScratchBuffer, Temporaries, Weight


@Temporaries
def adafactor(scratch: Scratch, weights: Sequence[Weight]) -> None:
    """Transformers' Adafactor: everything in fp32, with copies of 16-bit gradients and weights.

    The names of a weight keep what they hold until the next weight binds them.
    """
    gradient = weight32 = update = None
    for weight in weights:
        gradient = None
        if weight.itemsize < 4:
            gradient = scratch.like(weight, 4)
        weight32 = None
        if weight.itemsize < 4:
            weight32 = scratch.like(weight, 4)
        _root_mean_square(scratch)
        squared = scratch.like(weight, 4)
        shifted = scratch.like(weight, 4)
        del squared
        update = shifted
        del shifted
        if len(weight.shape) > 1:
            scratch.new(weight.rows(4))
            scratch.new(weight.columns(4))
            update = _product_of_factors(scratch, weight)
        else:
            update = scratch.like(weight, 4)
        _root_mean_square(scratch)
        scratch.like(weight, 4)
    del gradient, weight32, update


def _root_mean_square(scratch: Scratch) -> None:
    norm = scratch.scalar()
    scratch.scalar()
    del norm


def _product_of_factors(scratch: Scratch, weight: Weight) -> ScratchBuffer:
    mean = scratch.scalar() if len(weight.shape) == 2 else scratch.new(rounded(4 * weight.count // weight.shape[-1]))
    rows = scratch.new(weight.rows(4))
    del mean
    columns = scratch.new(weight.columns(4))
    product = scratch.like(weight, 4)
    del rows, columns
    return product


@Temporaries
def lion(scratch: Scratch, weights: Sequence[Weight]) -> None:
    """A copy of the momentum, and the update made from it."""
    for weight in weights:
        copy = scratch.like(weight)
        scratch.like(weight)
        del copy


def galore(*, refresh: bool) -> Temporaries:
    """AdamW on projected gradients, layer by layer. `refresh` says whether the projections are computed anew.

    A singular value decomposition in fp32 then gives each matrix's projection; that happens in the first step and in
    every 200th after it.
    """

    @Temporaries
    def step(scratch: Scratch, weights: Sequence[Weight]) -> None:
        denominator = normalised = None
        outer = [weight for weight in weights if not weight.is_hidden_matrix]
        low = None
        for weight in (*outer, *(weight for weight in weights if weight.is_hidden_matrix)):
            if not weight.is_hidden_matrix:
                denominator = scratch.like(weight)
                normalised = scratch.like(weight)
                continue
            low = None
            if refresh:
                _decompose(scratch, weight)
            small = Weight(projected(weight), weight.itemsize)
            low = scratch.like(small)
            denominator = scratch.like(small)
            normalised = scratch.like(small)
            full = scratch.like(weight)
            scaled = scratch.like(weight)
            normalised = scaled
            del full, scaled
        del denominator, normalised, low

    return step


def projected(weight: Weight) -> tuple[int, int]:
    """The shape of a projected gradient: its shorter side is cut down to the rank."""
    rows, columns = weight.shape
    rank = min(weight.rank, rows, columns)
    return (rows, rank) if rows >= columns else (rank, columns)


def _decompose(scratch: Scratch, weight: Weight) -> None:
    """fp32 copy, U, singular values and Vh of one gradient (the solver's own workspace is not known)."""
    rows, columns = weight.shape
    side = min(rows, columns)
    copy = scratch.like(weight, 4) if weight.itemsize < 4 else None
    left = scratch.like(Weight((rows, side), 4))
    values = scratch.like(Weight((side,), 4))
    right = scratch.like(Weight((side, columns), 4))
    kept = scratch.like(Weight(projected(weight), 4))
    del copy, left, values, right, kept


@Temporaries
def denominators(scratch: Scratch, weights: Sequence[Weight]) -> None:
    """One denominator (schedule-free), while that of the weight before is still bound."""
    denominator = None
    for weight in weights:
        denominator = scratch.like(weight)
    del denominator


@Temporaries
def any_precision(scratch: Scratch, weights: Sequence[Weight]) -> None:
    """AnyPrecisionAdamW with bf16 states: a root and its quotient, while that of the weight before is still bound."""
    variance = None
    for weight in weights:
        root = scratch.like(weight, 2)
        quotient = scratch.like(weight, 2)
        variance = quotient
        del root, quotient
    del variance


@Temporaries
def lomo(scratch: Scratch, weights: Sequence[Weight]) -> None:
    """fp32 copies of one 16-bit gradient and weight."""
    for weight in weights:
        copies = [scratch.like(weight, 4) for _ in range(2) if weight.itemsize < 4]
        del copies


@Temporaries
def adalomo(scratch: Scratch, weights: Sequence[Weight]) -> None:
    """LOMO with Adafactor's statistics: the update is one more fp32 tensor, made from two."""
    for weight in weights:
        gradient = scratch.like(weight, 4) if weight.itemsize < 4 else None
        squared = scratch.like(weight, 4)
        update = scratch.like(weight, 4)
        del squared
        if len(weight.shape) > 1:
            product = _product_of_factors(scratch, weight)
            update = product
            del product
        else:
            update = scratch.like(weight, 4)
        copy = scratch.like(weight, 4) if weight.itemsize < 4 else None
        del gradient, update, copy


@Temporaries
def galore_8bit(scratch: Scratch, weights: Sequence[Weight]) -> None:
    """A copy of each matrix while bitsandbytes steps its projection in its place, and the update projected back.

    Other weights are stepped by bitsandbytes alone. Projections are computed anew, as in the first step.
    """
    for weight in weights:
        if not weight.is_hidden_matrix:
            continue
        _decompose(scratch, weight)
        small = Weight(projected(weight), weight.itemsize)
        low = scratch.like(small)
        kept = scratch.like(weight)
        stand_in = scratch.like(small)
        full = scratch.like(weight)
        del low, kept, stand_in, full


@Temporaries
def apollo(scratch: Scratch, weights: Sequence[Weight]) -> None:
    """AdamW in a random subspace gives each channel of the gradient a scale: one scaled gradient at a time."""
    denominator = normalised = None
    for weight in weights:
        inner = weight.is_hidden_matrix
        small = Weight(projected(weight), weight.itemsize) if inner else weight
        low = scratch.like(small) if inner else None
        denominator = scratch.like(small)
        normalised = scratch.like(small)
        if inner:
            normalised = scratch.like(weight)
        del low
    del denominator, normalised


@Temporaries
def grokadamw(scratch: Scratch, weights: Sequence[Weight]) -> None:
    """The amplified gradient, made of two, and a denominator."""
    for weight in weights:
        slow = scratch.like(weight)
        amplified = scratch.like(weight)
        del slow
        denominator = scratch.like(weight)
        del amplified, denominator
