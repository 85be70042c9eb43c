"""One of several GPUs through the simulated allocator, against PyTorch's own on the same jobs.

Every line of `data/allocator/several_gpus.jsonl` is rank 0 of a group whose collectives send nothing, run for three
steps by DistributedDataParallel, `fully_shard` or DeepSpeed 0.19.6 with PyTorch 2.14's own allocator on a GPU whose
kernels do nothing. Cases read as in `support/distributed_rows.py`.
"""

import json
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
from support.allocator_rows import device, setup
from support.distributed_rows import options
from support.paths import DATA

from memcalc.allocator.conf import parse_alloc_conf
from memcalc.allocator.events import Events, JobEvents
from memcalc.allocator.loading import built, every_tensor
from memcalc.allocator.simulation import Simulated, simulate
from memcalc.allocator.smallest_device import smallest_capacity
from memcalc.allocator.training_events import training_events
from memcalc.estimation.estimate import estimate
from memcalc.estimation.process import needed_bytes
from memcalc.models.spec import ModelSpec
from memcalc.setup.setup import TrainingSetup
from memcalc.tables.gpus import find_gpu
from memcalc.tables.precisions import PRECISIONS
from memcalc.training.step import trace
from memcalc.training.traced_step import Step, Tracing

ROWS = [json.loads(line) for line in (DATA / "allocator" / "several_gpus.jsonl").read_text().splitlines()]


def name(row: dict[str, Any]) -> str:
    case = row["case"]
    said = [f"{key}={case[key]}" for key in case if key not in ("config", "head", "batch", "seq", "lora")]
    return " ".join([case["config"]["model_type"], *said, *(["lora"] if "lora" in case else [])])


def options_of(case: dict[str, Any]) -> TrainingSetup:
    recipe = {"mixed-bf16": "bf16-mixed"}.get(case["recipe"], case["recipe"])
    return setup({**case, "recipe": recipe, "options": options(case)})


def traced(case: dict[str, Any], accumulated: bool, every_block: bool) -> Step:
    one = options_of(case).model_copy(update={"grad_accum": 2 if accumulated else 1})
    return trace(ModelSpec.from_config(case["config"]), one, tracing=Tracing(device(case), every_block))


def emptied(step: Step) -> Events:
    """Shards as `model.to_empty` makes them: those of tied weights for each module, of which the last stay."""
    events, made, spare = Events(), dict[int, int](), list[int]()
    assert step.engine is not None
    for tensor, again in every_tensor(step.network):
        if again:
            spare.append(made[id(tensor)])
        made[id(tensor)] = events.malloc(step.engine.kept_bytes(tensor))
    for number in spare:
        events.free(number)
    return events


@cache
def run(index: int) -> tuple[JobEvents, Simulated]:
    case = ROWS[index]["case"]
    workspace = 32 * 2**20 if device(case).capability >= (9, 0) else 8_519_680
    load = partial(built, dtype=PRECISIONS[options_of(case).precision].weights)  # DDP's models were built on the GPU
    job = training_events(partial(traced, case), case.get("accum", 1), workspace, load)
    if case["mode"] == "fsdp2":
        job = replace(job, loading=emptied(traced(case, False, False)))
    return job, simulate(job, parse_alloc_conf(case.get("alloc_conf", "")))


@pytest.mark.parametrize("index", range(len(ROWS)), ids=list(map(name, ROWS)))
def test_a_rank_reserves_what_pytorch_reserved(index: int) -> None:
    measured = ROWS[index]["measured"]
    _, found = run(index)
    allocated = [max(step.allocated.values()) for step in found.steps]
    reserved = [max(step.reserved.values()) for step in found.steps]
    assert allocated[min(1, len(allocated) - 1)] == measured["allocated"][1]
    assert max(reserved[:3]) == max(measured["reserved"])


@pytest.mark.parametrize("index", [index for index, row in enumerate(ROWS) if "fits_in" in row["measured"]])
def test_the_smallest_device_is_the_one_that_was_measured(index: int) -> None:
    found = smallest_capacity(*run(index))
    assert found == pytest.approx(ROWS[index]["measured"]["fits_in"], rel=0.002)


def test_the_report_of_several_gpus_says_what_was_simulated() -> None:
    case = next(row["case"] for row in ROWS if row["case"]["mode"] == "fsdp2")
    spec, gpu = ModelSpec.from_config(case["config"]), find_gpu("H100")
    report = estimate(spec, options_of(case), gpu)
    assert any(assumption.code == "allocator_simulated" for assumption in report.assumptions)
    assert report.peak.allocated_bytes <= report.peak.reserved_bytes
    needed = needed_bytes(spec, options_of(case), gpu)
    assert needed is not None
    assert needed <= report.peak.process_bytes
