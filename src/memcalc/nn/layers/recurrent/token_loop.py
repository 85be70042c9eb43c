"""Loops over the tokens of a sequence, run for a few of them and accounted for all."""

from __future__ import annotations

from collections.abc import Iterator

from memcalc.autograd.tape import Tape

EXACT = 3
"""How many tokens at either end of a sequence are run one by one; those between them run once for all."""


def token_steps(tape: Tape, length: int) -> Iterator[int]:
    """How many tokens each run of a loop's body stands for.

    What one run in the middle leaves alive counts for as many tokens as it stands for. Every token changes what is
    alive by the same bytes, forward and backward, so that no peak lies strictly between the ends.
    """
    between = length - 2 * EXACT
    if between < 1:
        yield from [1] * length
        return
    yield from [1] * EXACT
    since, before, tape.turns = tape.clock, tape.turns, tape.turns * between
    yield between
    tape.turns = before
    born = range(since, tape.clock)
    yield 1  # only then has the body let go of what one run hands to the next
    tape.scale_live(born, between)
    yield from [1] * (EXACT - 1)
