"""Scratch memory of the optimizers in torch.optim, by implementation.

Source: torch/optim/{adam,rmsprop,adagrad,_adafactor,_muon}.py of PyTorch 2.14, with weight decay off or decoupled.
"""

from __future__ import annotations

from collections.abc import Sequence

from memcalc.optim.weight import SCALAR, Scratch, ScratchBuffer, Temporaries, Weight, by_dtype


@Temporaries
def adam_loop(scratch: Scratch, weights: Sequence[Weight]) -> None:
    """The denominator: a root, then its quotient, while that of the weight before is still bound."""
    denominator = None
    for weight in weights:
        root = scratch.like(weight)
        quotient = scratch.like(weight)
        denominator = quotient
        del root, quotient
    del denominator


@Temporaries
def root_loop(scratch: Scratch, weights: Sequence[Weight]) -> None:
    """One root (rmsprop, adagrad), while that of the weight before is still bound."""
    root = None
    for weight in weights:
        root = scratch.like(weight)
    del root


@Temporaries
def one_list(scratch: Scratch, weights: Sequence[Weight]) -> None:
    """A list with a tensor per weight; that of the dtype before is bound until it is rebound."""
    roots: list[ScratchBuffer] = []
    for group in by_dtype(weights):
        roots = scratch.likes(group)
    del roots


@Temporaries
def two_lists(scratch: Scratch, weights: Sequence[Weight]) -> None:
    """Roots and numerators (adagrad)."""
    roots: list[ScratchBuffer] = []
    numerators: list[ScratchBuffer] = []
    for group in by_dtype(weights):
        roots = scratch.likes(group)
        numerators = scratch.likes(group)
    del roots, numerators


@Temporaries
def adafactor_loop(scratch: Scratch, weights: Sequence[Weight]) -> None:
    """Statistics and estimate of one weight; each name keeps what the weight before left in it."""
    row = column = squared = estimate = update = None
    for weight in weights:
        if len(weight.shape) > 1:
            row = scratch.new(weight.rows())
            column = scratch.new(weight.columns())
            scratch.reduce_rows(weight)
            product = scratch.like(weight)
            estimate = product
            del product
            scratch.scalar()  # the mean of the row statistics
        else:
            squared = scratch.like(weight)
            copy = scratch.like(weight)
            estimate = copy
            del copy
        update = estimate
        scratch.scalar()
    del row, column, squared, estimate, update


@Temporaries
def adafactor_foreach(scratch: Scratch, weights: Sequence[Weight]) -> None:
    """All matrices at once, then all vectors; a group's estimates stay bound while the next one works."""
    estimates: list[ScratchBuffer] = []
    updates: list[ScratchBuffer] = []
    for group in _by_dtype_and_rank(weights):
        if len(group[0].shape) > 1:
            means = scratch.each(group, Weight.rows)
            means = []
            means = scratch.each(group, Weight.columns)
            means = []
            estimates = scratch.likes(group)
            means = scratch.each(group, lambda weight: SCALAR)
            means = []
        else:
            means = scratch.likes(group)
            means = []
            estimates = scratch.likes(group)
        updates = estimates
        scratch.scalar()
        del means
    del estimates, updates


def _by_dtype_and_rank(weights: Sequence[Weight]) -> list[list[Weight]]:
    groups: list[list[Weight]] = []
    for alike in by_dtype(weights):
        ranks: dict[bool, list[Weight]] = {}
        for weight in alike:
            ranks.setdefault(len(weight.shape) > 1, []).append(weight)
        groups += ranks.values()
    return groups


@Temporaries
def muon(scratch: Scratch, weights: Sequence[Weight]) -> None:
    """Newton-Schulz iterations in bf16 on one matrix after another; then AdamW (foreach) for everything else.

    A bf16 update is orthogonalised in place. The update of the matrix before is bound until this one's exists.
    """
    update = None
    for weight in weights:
        if weight.is_hidden_matrix:
            momentum = scratch.like(weight)
            update = momentum
            del momentum
            update = _orthogonal(scratch, weight, update)
    del update
    roots: list[ScratchBuffer] = []
    for group in by_dtype([weight for weight in weights if not weight.is_hidden_matrix]):
        roots = scratch.likes(group)
    del roots


def _orthogonal(scratch: Scratch, weight: Weight, gradient: ScratchBuffer) -> ScratchBuffer:
    side = min(weight.shape)
    square = Weight((side, side), 2)
    matrix = gradient if weight.itemsize == 2 else scratch.like(weight, 2)
    norm = scratch.scalar()
    scratch.scalar()
    del norm
    gram = polynomial = None
    for _ in range(2):
        gram = scratch.like(square)
        polynomial = scratch.like(square)
        matrix = scratch.like(weight, 2)
    del gram, polynomial
    return matrix
