"""Training jobs through the simulated allocator, against PyTorch's own on the same jobs."""

from functools import partial
from typing import Any

import pytest
from support import allocator_rows
from support.allocator_rows import ROWS, events, name

from memcalc.allocator.conf import parse_alloc_conf
from memcalc.allocator.events import WORKSPACE
from memcalc.allocator.simulation import Simulated, simulate
from memcalc.allocator.smallest_device import runs, smallest_capacity
from memcalc.allocator.training_events import TrainingEvents
from memcalc.autograd.tape import GRADIENTS

LOADED_WITH_MORE = ("vit", "bart")
"""Families whose buffers Transformers makes on the way of loading come and go: a small segment more."""
SMALL_SEGMENT = 2 * 2**20


def simulated(row: dict[str, Any]) -> tuple[TrainingEvents, Simulated]:
    case = row["case"]
    job = events(case)
    conf = parse_alloc_conf(case.get("alloc_conf", ""))
    return job, simulate(job, conf, empty_cache=case.get("empty_cache", False))


@pytest.mark.parametrize("row", ROWS, ids=map(name, ROWS))
def test_a_job_gives_what_pytorch_gave(row: dict[str, Any]) -> None:
    """Rows are three steps long: a job whose reserve still grows in the fourth is compared up to there."""
    measured = row["measured"]
    _, found = simulated(row)
    second = found.steps[min(1, len(found.steps) - 1)]
    assert max(second.allocated.values()) == max(measured["phases"].values())
    reserved = [max(step.reserved.values()) for step in found.steps[:3]]
    assert max(reserved) == max(measured["reserved"])
