"""Training of denoisers through the simulated allocator, against PyTorch's own on runs of diffusers' loop.

Every line of `data/allocator/denoisers.jsonl` has what was allocated and reserved in each step of the run of that name
in `data/diffusion.jsonl`.
"""

import json
from dataclasses import replace
from typing import Any

import pytest
from support.diffusion_rows import components, of_diffusers, rows, setup
from support.paths import DATA
from support.tape_events import DEVICES

from memcalc.allocator.simulation import simulate
from memcalc.allocator.training_events import training_events
from memcalc.estimation.estimate import estimate
from memcalc.setup.setup import TrainingSetup
from memcalc.training.step import trace
from memcalc.training.traced_step import Step, Tracing

CASES = {name: row["case"] for name, row in rows()}
ROWS = [json.loads(line) for line in (DATA / "allocator" / "denoisers.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("row", ROWS, ids=[row["name"] for row in ROWS])
def test_a_denoiser_reserves_what_pytorch_reserved(row: dict[str, Any]) -> None:
    case = CASES[row["name"]]
    device = DEVICES[case.get("device", "h100")]
    spec = replace(of_diffusers(case["model"], case["config"]), components=components(case))

    def traced(accumulated: bool, every_block: bool) -> Step:
        return trace(spec, setup(case), tracing=Tracing(device, every_block))

    found = simulate(training_events(traced, 1, 32 * 2**20 if device.capability >= (9, 0) else 8_519_680))
    allocated = [max(step.allocated.values()) for step in found.steps]
    assert allocated[min(1, len(allocated) - 1)] == row["allocated"][1]
    assert max(max(step.reserved.values()) for step in found.steps[:3]) == max(row["reserved"])


@pytest.mark.parametrize(
    ("options", "simulated"), [({}, True), ({"use_ema": True}, True), ({"parallel": "ddp", "gpus": 2}, False)]
)
def test_what_is_simulated_of_denoisers(options: dict[str, Any], simulated: bool) -> None:
    case = CASES["sd15 full bf16"]
    spec = of_diffusers(case["model"], case["config"])
    report = estimate(spec, TrainingSetup(height=64, width=64, precision="bf16", **options), "H100")
    assert any(assumption.code == "allocator_simulated" for assumption in report.assumptions) == simulated
    assert report.peak.allocated_bytes <= report.peak.reserved_bytes
