"""Training jobs through the simulated allocator, against PyTorch's own on the same jobs."""

from functools import cache

import pytest
from support.allocator_rows import ROWS, events, name

from memcalc.allocator.conf import AllocatorConf, parse_alloc_conf
from memcalc.allocator.events import JobEvents
from memcalc.allocator.simulation import Simulated, simulate
from memcalc.allocator.smallest_device import runs, smallest_capacity

pytestmark = pytest.mark.xdist_group("training jobs")  # each job is simulated once

SMALL_SEGMENT = 2 * 2**20
NAMES = list(map(name, ROWS))


@cache
def run(index: int) -> tuple[JobEvents, AllocatorConf, Simulated]:
    case = ROWS[index]["case"]
    job, conf = events(case), parse_alloc_conf(case.get("alloc_conf", ""))
    return job, conf, simulate(job, conf, empty_cache=case.get("empty_cache", False))


@pytest.mark.parametrize("index", range(len(ROWS)), ids=NAMES)
def test_a_job_gives_what_pytorch_gave(index: int) -> None:
    """Rows are three steps long: of a job whose reserve still grows in the fourth, the first three are compared."""
    measured = ROWS[index]["measured"]
    _, _, found = run(index)
    second = found.steps[min(1, len(found.steps) - 1)]
    assert max(second.allocated.values()) == max(measured["phases"].values())
    reserved = max(max(step.reserved.values()) for step in found.steps[:3])
    assert reserved == max(measured["reserved"])


@pytest.mark.parametrize(
    "index", [i for i, row in enumerate(ROWS) if "fits_in" in row["measured"] and not row["case"].get("accum")]
)
def test_the_smallest_device_is_the_one_that_was_measured(index: int) -> None:
    job, conf, unlimited = run(index)
    found = smallest_capacity(job, unlimited, conf)
    assert found == pytest.approx(ROWS[index]["measured"]["fits_in"], rel=0.002)
    assert runs(job, found, conf)
    assert unlimited.allocated <= found <= unlimited.reserved


def test_three_micro_batches_need_one_segment_more_than_measured() -> None:
    index = next(i for i, row in enumerate(ROWS) if row["case"].get("accum") == 3)
    job, conf, unlimited = run(index)
    assert smallest_capacity(job, unlimited, conf) - ROWS[index]["measured"]["fits_in"] == SMALL_SEGMENT


def phases(found: Simulated) -> list[tuple[int, int]]:
    return [(step.allocated[phase], step.reserved[phase]) for step in found.steps for phase in step.allocated]


@pytest.mark.parametrize("index", range(0, len(ROWS), 6), ids=NAMES[::6])
def test_laws(index: int) -> None:
    _, _, found = run(index)
    assert all(allocated <= reserved for allocated, reserved in phases(found))
    assert found.loaded <= found.steps[0].reserved["forward"]
    assert [list(step.allocated) for step in found.steps] == [["forward", "backward", "step"]] * len(found.steps)
