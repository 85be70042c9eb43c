"""Bytes that a rank sends in one optimizer step, by collective: arithmetic of rings, no promise of seconds."""

from __future__ import annotations

from memcalc.autograd.tape import Tape

ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE = "all-gather", "reduce-scatter", "all-reduce"


def gather(tape: Tape, whole: int, ranks: int) -> None:
    """Every rank passes on what it has until all have `whole` bytes."""
    tape.send(ALL_GATHER, whole * (ranks - 1) // ranks)


def scatter(tape: Tape, whole: int, ranks: int) -> None:
    """`whole` bytes are summed, and each rank keeps its part."""
    tape.send(REDUCE_SCATTER, whole * (ranks - 1) // ranks, last=True)


def reduce(tape: Tape, whole: int, ranks: int, *, last: bool = False) -> None:
    """`whole` bytes are summed on every rank: a reduce-scatter and an all-gather."""
    tape.send(ALL_REDUCE, 2 * whole * (ranks - 1) // ranks, last=last)
