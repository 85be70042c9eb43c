"""Training jobs run with PyTorch's own allocator as test data, and how a case reads as events.

Every line of `data/allocator/training.jsonl` is one run of three optimizer steps of the real Transformers model (torch
2.14.1, transformers 5.24.0, peft 0.21.2) with PyTorch's CUDA allocator on a GPU whose kernels do nothing. `measured`
has the peaks of `torch.cuda.memory_stats()` by step, those of the second step by phase, what was reserved when the
model was there, and for some the smallest device memory on which the job ran.
"""

import json
from functools import partial
from typing import Any

from memcalc.allocator import loading
from memcalc.allocator.events import JobEvents
from memcalc.allocator.training_events import training_events
from memcalc.models.spec import ModelSpec
from memcalc.setup.setup import TrainingSetup
from memcalc.tables.cuda_devices import CudaDevice
from memcalc.tables.precisions import PRECISIONS
from memcalc.training.step import trace
from memcalc.training.traced_step import Step, Tracing
from support.measured_rows import training_setup
from support.paths import DATA
from support.tape_events import DEVICES

ROWS = [json.loads(line) for line in (DATA / "allocator" / "training.jsonl").read_text().splitlines()]


def name(row: dict[str, Any]) -> str:
    """What a case is, in a few words."""
    case = row["case"]
    options = [f"{key}={case[key]}" for key in case if key not in ("config", "head", "lora") and case[key]]
    return " ".join([case["config"]["model_type"], *options, *(["lora"] if "lora" in case else [])])


def setup(case: dict[str, Any]) -> TrainingSetup:
    """The options of a case. Where it names no implementation, Adafactor loops, as torch.optim has it."""
    changes: dict[str, Any] = {}
    if case.get("optimizer") == "adafactor" and "foreach" not in case:
        changes["optimizer_impl"] = "for-loop"
    return training_setup(case | {"seq": case["seq"] or 128}).model_copy(update=changes)


def device(case: dict[str, Any]) -> CudaDevice:
    """The GPU of a case."""
    return DEVICES[case.get("device", "h100")]


def traced(case: dict[str, Any], accumulated: bool, every_block: bool) -> Step:
    """One micro-batch of a case, after others or not."""
    options = setup(case).model_copy(update={"grad_accum": 2 if accumulated else 1})
    return trace(ModelSpec.from_config(case["config"]), options, tracing=Tracing(device(case), every_block))


def events(case: dict[str, Any]) -> JobEvents:
    """What a case asks of the allocator. Its model was built on the GPU."""
    options = setup(case)
    workspace = 32 * 2**20 if device(case).capability >= (9, 0) else 8_519_680
    load = partial(loading.built, dtype=PRECISIONS[options.precision].weights)
    return training_events(partial(traced, case), options.grad_accum, workspace, load)
