"""How many micro-batches a rank holds: Narayanan et al. 2021 (arXiv:2104.04473), section 2.2."""

import pytest

from memcalc.parallel.schedules import actions, in_flight
from memcalc.parallel.setup import ParallelSetup


@pytest.mark.parametrize("stages", [2, 4, 8])
@pytest.mark.parametrize("microbatches", [8, 16, 64])
def test_gpipe_holds_all_and_1f1b_no_more_than_stages(stages: int, microbatches: int) -> None:
    for rank in range(stages):
        gpipe = ParallelSetup(pipeline=stages, microbatches=microbatches, schedule="gpipe")
        assert in_flight(gpipe, rank) == microbatches
        one = ParallelSetup(pipeline=stages, microbatches=microbatches, schedule="1f1b")
        assert in_flight(one, rank) == min(microbatches, stages - rank)


@pytest.mark.parametrize("virtual", [2, 4])
def test_interleaving_holds_more_by_the_factor_of_the_paper(virtual: int) -> None:
    """The first rank holds 1 + (p - 1) / (p v) times the activations: in parts of a v-th of its blocks."""
    stages, microbatches = 4, 32
    layout = ParallelSetup(pipeline=stages, microbatches=microbatches, schedule="interleaved", virtual=virtual)
    parts = in_flight(layout, 0)
    assert parts == stages * virtual + stages - 1


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved"])
def test_every_micro_batch_runs_forward_then_backward(schedule: str) -> None:
    virtual = 2 if schedule == "interleaved" else 1
    layout = ParallelSetup(pipeline=4, microbatches=8, schedule=schedule, virtual=virtual)  # type: ignore[arg-type]
    for rank in range(4):
        done: dict[tuple[int, bool], int] = {}
        for action in actions(layout, rank):
            done[action.stage, action.forward] = done.get((action.stage, action.forward), 0) + 1
            assert done.get((action.stage, True), 0) >= done.get((action.stage, False), 0)
        assert set(done.values()) == {8}
        assert len(done) == 2 * virtual
