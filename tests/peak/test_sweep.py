"""The sweep on tapes made by hand: live bytes are summed at every sample, and the first of equal maxima is the peak."""

from collections.abc import Sequence

import pytest

from memcalc.autograd.spans import TracedBlock
from memcalc.autograd.tape import ACTIVATIONS, NEVER, OVERHEAD, TEMPORARY, Tape
from memcalc.autograd.tensor import Storage
from memcalc.peak.sweep import Sweep

KB = 1024
Life = tuple[int, int | None]
"""Kilobytes of an allocation, and the clock at which it dies; None where it outlives the tape."""


def tape(lives: Sequence[Life], row: str = TEMPORARY) -> Tape:
    """A tape with allocations of these lives, one a tick."""
    made = Tape()
    kept: list[Storage] = []
    for size, _ in lives:
        kept.append(made.allocate(size * KB, row, f"{size} KB"))
    for storage, (_, dies) in zip(kept, lives, strict=True):
        storage.allocation.dies = NEVER if dies is None else dies
        made.keep(storage)  # its end is what was said, not that of `kept`
    made.finish()
    return made


def peak(made: Tape, phase: str = "forward") -> tuple[int, int]:
    """Kilobytes at the peak of a phase, and its tick."""
    nbytes, moment = Sweep(made).peaks()[0][phase]
    return nbytes // KB, moment.tick


def test_nothing() -> None:
    made = tape([])
    assert Sweep(made).peaks() == ({}, {})
    assert Sweep(made).saved_for_backward(0) == 0


@pytest.mark.parametrize(
    ("lives", "expected"),
    [
        ([(4, None)], (4, 0)),
        ([(4, 1)], (4, 0)),
        ([(4, 1), (3, 2)], (4, 0)),
        ([(4, 2), (3, None)], (7, 1)),
        ([(4, 1), (4, 2), (4, 3)], (4, 0)),
        ([(1, 4), (2, 3), (4, 3), (3, None)], (7, 2)),
        ([(1, None), (2, 2), (2, 3), (1, None), (1, None)], (3, 1)),
        ([(8, 2), (1, 2), (2, None), (6, None)], (9, 1)),
    ],
    ids=["one", "freed at the end", "freed before", "overlapping", "ties", "inside", "ties later", "late"],
)
def test_one_span(lives: list[Life], expected: tuple[int, int]) -> None:
    assert peak(tape(lives)) == expected


def test_rows_have_maxima_of_their_own() -> None:
    made = Tape()
    first = made.allocate(4 * KB, ACTIVATIONS, "a")
    del first
    second = made.allocate(KB, OVERHEAD, "b")
    third = made.allocate(KB, OVERHEAD, "b")
    made.finish()
    found, rows = Sweep(made).peaks()
    assert found["forward"][0] == 4 * KB
    assert rows["forward"] == [0, 0, 0, 4 * KB, 0, 2 * KB]
    assert Sweep(made).live_at(found["forward"][1]) == {(ACTIVATIONS, "a"): 4 * KB}
    del second, third


def test_each_phase_has_its_peak() -> None:
    made = Tape()
    kept = made.allocate(2 * KB)
    made.begin_span("backward", None)
    more = made.allocate(3 * KB)
    del kept
    last = made.allocate(KB)
    made.finish()
    assert peak(made) == (2, 0)
    assert peak(made, "backward") == (5, 1)
    del more, last


def test_of_equal_moments_of_a_phase_the_first_is_the_peak() -> None:
    made = Tape()
    block = TracedBlock("block", 1, "kind", 0, [0])
    for owner in (None, block, None):
        made.begin_span("forward", owner)
        used = made.allocate(3 * KB)
        del used
    made.finish()
    assert peak(made) == (3, 0)


def test_bytes_are_rounded_and_what_is_saved_is_not() -> None:
    made = Tape()
    storage = made.allocate(700, ACTIVATIONS, "a")
    storage.allocation.saved = True
    made.finish()
    assert Sweep(made).peaks()[0]["forward"][0] == 1024
    assert Sweep(made).saved_for_backward(1) == 700
    assert Sweep(made).saved_for_backward(0) == 0


def test_what_stood_before_can_be_released() -> None:
    made = tape([(6, None)])
    made.release(2 * KB, TEMPORARY, "before")
    later = made.allocate(KB)
    made.finish()
    assert peak(made) == (6, 0)
    del later


def blocks(counts: Sequence[int], kept: int, used: int) -> Tape:
    """A stack whose traced blocks stand for `counts` blocks each; one keeps `kept` KB and uses `used` besides."""
    made = Tape()
    held, position, depth = [], 0, sum(counts)
    for count in counts:
        positions = list(range(position, position + count))
        position += count
        made.begin_span("forward", TracedBlock("block", depth, "kind", positions[0], positions))
        held.append(made.allocate(kept * KB, ACTIVATIONS, "kept"))
        temporary = made.allocate(used * KB)
        del temporary
        made.begin_span("forward", None)
    last = made.allocate(KB)
    made.finish()
    for storage in held:
        made.keep(storage)
    made.keep(last)
    return made


@pytest.mark.parametrize("counts", [[1], [1, 1, 1], [5], [30, 1], [1, 30, 1], [3, 4, 5]])
def test_blocks_that_stand_for_others(counts: list[int]) -> None:
    """As many are kept as there are blocks, and the last one is the fullest."""
    kept, used = 10, 7
    total = sum(counts)
    nbytes, moment = Sweep(blocks(counts, kept, used)).peaks()[0]["forward"]
    assert nbytes == (total * kept + used) * KB
    assert moment.position == total - 1
    assert Sweep(blocks(counts, kept, used)).live_at(moment)[ACTIVATIONS, "kept"] == total * kept * KB


def test_blocks_that_keep_less_than_they_release() -> None:
    """What was there before is released by every block: the first is the fullest."""
    made = Tape()
    stands = made.allocate(100 * KB, ACTIVATIONS, "stands")
    made.begin_span("backward", TracedBlock("block", 4, "kind", 0, [0, 1, 2, 3]))
    made.release(20 * KB, ACTIVATIONS, "stands")
    small = made.allocate(KB)
    made.keep(small)
    made.finish()
    made.keep(stands)
    nbytes, moment = Sweep(made).peaks()[0]["backward"]
    assert (nbytes, moment.position) == (81 * KB, 3)  # backward runs the last block first
    assert Sweep(made).saved_for_backward(1) == 0
