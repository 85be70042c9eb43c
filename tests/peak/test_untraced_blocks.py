"""What blocks that were not traced leave behind and release, on tapes made by hand."""

from memcalc.autograd.spans import TracedBlock
from memcalc.autograd.tape import ACTIVATIONS, TEMPORARY, Tape
from memcalc.autograd.tensor import Storage
from memcalc.peak.sweep import Sweep
from memcalc.peak.untraced_blocks import Region, UntracedBlocks, stretches

KB = 1024
MANY = 5


def traced(stack: str = "block", positions: int = MANY, start: int = 0, depth: int = MANY) -> TracedBlock:
    return TracedBlock(stack, depth, "kind", start, list(range(start, start + positions)))


def test_spans_of_one_stack_and_phase_belong_together() -> None:
    made = Tape()
    first, second, other = traced(positions=4), traced(positions=1, start=4), traced("decoder block")
    for block in (first, second, None, other):
        made.begin_span("forward", block)
        made.allocate(KB)
    made.begin_span("backward", other)
    made.allocate(KB)
    made.finish()
    found = [item for item in stretches(made.spans) if isinstance(item, Region)]
    assert [(region.phase, [span.block for span in region.spans]) for region in found] == [
        ("forward", [first, second]),
        ("forward", [other]),
        ("backward", [other]),
    ]
    assert [position for position, _ in found[0].order()] == [0, 1, 2, 3, 4]
    assert [position for position, _ in found[2].order()] == [4, 3, 2, 1, 0]


def test_work_between_two_blocks_counts_with_the_one_that_follows() -> None:
    made = Tape()
    made.begin_span("forward", traced(positions=2, depth=4))
    made.allocate(KB)
    made.begin_span("forward", None)
    between = made.allocate(2 * KB)
    made.begin_span("forward", traced(positions=2, start=2, depth=4))
    inside = made.allocate(4 * KB)
    made.begin_span("forward", None)
    made.finish()
    untraced = UntracedBlocks(made)
    assert [untraced.copies(tick) for tick in range(3)] == [2, 2, 2]
    assert untraced.regions[0].spans[1].changes == {(TEMPORARY, "loss outside the model"): 6 * KB}
    del between, inside


def forward_and_backward(*, saves: int, hands_on: int = 0, shares: int = 0) -> Sweep:
    """MANY blocks: each saves something for its backward, hands something to the next, and uses what all share."""
    made = Tape()
    block = traced()
    common = made.allocate(shares * KB, ACTIVATIONS, "shared")
    made.begin_span("forward", block)
    saved = made.allocate(saves * KB, ACTIVATIONS, "saved")
    handed = made.allocate(hands_on * KB, ACTIVATIONS, "handed on")
    handed.allocation.handed_over = True
    made.begin_span("forward", None)
    middle = made.allocate(KB)
    made.begin_span("backward", block)
    gradient = made.allocate(KB)
    del saved, handed, common, gradient, middle
    made.begin_span("backward", None)
    last = made.allocate(KB)
    made.finish()
    made.keep(last)
    return Sweep(made)


def test_what_a_block_saves_it_releases_in_its_own_backward() -> None:
    sweep = forward_and_backward(saves=10)
    found, _ = sweep.peaks()
    assert found["forward"][0] == (MANY * 10 + 1) * KB  # after the last block, with what stands between
    assert found["backward"][0] == (MANY * 10 + 2) * KB
    assert found["backward"][1].position == MANY - 1
    assert sweep.live_at(found["backward"][1])[ACTIVATIONS, "saved"] == MANY * 10 * KB


def test_what_is_handed_on_goes_with_the_block_that_took_it() -> None:
    found, _ = forward_and_backward(saves=10, hands_on=3).peaks()
    assert found["backward"][0] == (MANY * 13 + 2) * KB


def test_what_all_blocks_share_is_released_by_the_last_of_them_alone() -> None:
    sweep = forward_and_backward(saves=10, shares=100)
    found, _ = sweep.peaks()
    assert found["backward"][0] == (100 + MANY * 10 + 2) * KB
    last = [moment for moment, _ in sweep.moments() if moment.phase == "backward" and moment.block is None]
    assert (ACTIVATIONS, "shared") not in sweep.live_at(last[-1])


def test_what_is_released_outside_its_stack_is_released_for_all_blocks_at_once() -> None:
    made = Tape()
    made.begin_span("forward", traced())
    kept: list[Storage] = [made.allocate(10 * KB, ACTIVATIONS, "hidden states")]
    made.begin_span("forward", None)
    kept.append(made.allocate(KB))
    del kept[0]
    kept.append(made.allocate(2 * KB))
    made.finish()
    sweep = Sweep(made)
    assert [(a.name, count) for a, count in UntracedBlocks(made).released_outside] == [("hidden states", MANY - 1)]
    found, _ = sweep.peaks()
    assert found["forward"][0] == (MANY * 10 + 1) * KB
    moments = [moment for moment, span in sweep.moments() if moment.block is None and span.end > span.start]
    assert sum(sweep.live_at(moments[-1]).values()) == (MANY * 10 + 1) * KB  # at its first sample, before they go
    made.keep(kept[0])
