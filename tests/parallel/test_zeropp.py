"""ZeRO++'s second shards (hpZ), against DeepSpeed 0.19.6 on PyTorch's real allocator, rank 0 of eight."""

import json
from typing import Any

import pytest
from support.paths import DATA

from memcalc import ModelSpec, TrainingSetup, canonical_spec, estimate
from memcalc.errors import UsageError
from memcalc.parallel.layout import layout_of
from memcalc.peak.ranks import phase_totals
from memcalc.tables.cuda_devices import CudaDevice
from memcalc.training.step import trace
from memcalc.training.traced_step import Tracing

ROWS = [json.loads(line) for line in (DATA / "zeropp.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: str(row["case"]["zero"]["zero_hpz_partition_size"]))
def test_every_phase_to_the_byte(row: dict[str, Any]) -> None:
    """The second copy of a weight is made when it is first freed; in the step of the first row some weights still wait
    for another stream."""
    case = row["case"]
    setup = TrainingSetup(
        batch=case["batch"],
        seq_len=case["seq"],
        precision="bf16",
        optimizer_impl="fused",
        parallel="zero3",
        gpus=case["world"],
        **{f"zero_{name.removeprefix('zero_')}": value for name, value in case["zero"].items()},
    )
    spec = ModelSpec.from_config({**case["config"], "architectures": ["LlamaForCausalLM"]})
    step = trace(spec, setup, layout=layout_of(setup, spec.config), tracing=Tracing(device=CudaDevice((9, 0), 132)))
    for phase, found in phase_totals(step).items():
        if phase != "step" or case["zero"]["stage3_max_reuse_distance"]:
            assert found == row["phase_rounded"][phase] - row["workspaces"] - row["inputs"], phase


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"zero_hpz_partition_size": 3, "parallel": "zero3", "gpus": 8}, "does not divide the 8 GPUs"),
        ({"zero_hpz_partition_size": 2, "parallel": "zero2", "gpus": 8}, "belongs to --parallel zero3"),
    ],
)
def test_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        estimate(canonical_spec(10**8)[0], TrainingSetup(**options))
