"""Loops of Trainer and of TRL's trainers through the simulated allocator, against runs of the libraries themselves."""

from functools import partial
from typing import Any

import pytest
from support.tape_events import DEVICES
from support.trainer_rows import TASKS, options, rows

from memcalc.allocator.job import traced_micro_batch
from memcalc.allocator.simulation import simulate
from memcalc.allocator.training_events import training_events
from memcalc.models.spec import ModelSpec
from memcalc.setup.setup import TrainingSetup

RESERVED = [(name, row) for name, row in rows() if "reserved" in row["measured"]]


@pytest.mark.parametrize("row", [row for _, row in RESERVED], ids=[name for name, _ in RESERVED])
def test_a_loop_reserves_what_it_was_measured_to(row: dict[str, Any]) -> None:
    case = row["case"]
    spec = ModelSpec.from_config(case["config"])
    spec = spec.with_head(TASKS[case["head"]]) if "head" in case else spec
    setup = TrainingSetup(**options(case)).with_trainer_defaults()
    job = training_events(partial(traced_micro_batch, spec, setup, DEVICES["h100"], None), setup.grad_accum, 32 * 2**20)
    reserved = max(max(step.reserved.values()) for step in simulate(job).steps[:3])
    assert reserved == pytest.approx(row["measured"]["reserved"], rel=0.01)
