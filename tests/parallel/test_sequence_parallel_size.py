"""DeepSpeed-Ulysses, against DeepSpeed 0.19.6's engine and attention on PyTorch's real allocator.

Each row is rank 0; live tensors are counted rounded to 512 bytes. Token ids, positions and labels are its inputs.
"""

import json
from typing import Any

import pytest
from support.paths import DATA

from memcalc import ModelSpec, TrainingSetup, estimate
from memcalc.errors import UsageError
from memcalc.parallel.layout import layout_of
from memcalc.peak.ranks import phase_totals
from memcalc.tables.cuda_devices import CudaDevice
from memcalc.training.step import trace
from memcalc.training.traced_step import Tracing

SPEC = ModelSpec.from_config(
    {
        "model_type": "llama",
        "hidden_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "architectures": ["LlamaForCausalLM"],
    }
)
ROWS = [json.loads(line) for line in (DATA / "ulysses.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"zero{row['case']['stage']}-{row['case']['sp']}")
def test_every_phase_to_the_byte(row: dict[str, Any]) -> None:
    case = row["case"]
    setup = TrainingSetup(
        batch=case["batch"],
        seq_len=case["seq"],
        precision="bf16",
        optimizer_impl="fused",
        parallel=f"zero{case['stage']}",  # type: ignore[arg-type]
        gpus=case["world"],
        sequence_parallel_size=case["sp"],
        activation_checkpointing="full" if case.get("ckpt") else "none",
        **{f"zero_{name}": value for name, value in case["zero"].items()},
    )
    spec = ModelSpec.from_config({**case["config"], "architectures": ["LlamaForCausalLM"]})
    step = trace(spec, setup, layout=layout_of(setup, spec.config), tracing=Tracing(device=CudaDevice((9, 0), 132)))
    seen = sum(allocation.nbytes for allocation in step.tape.inputs if allocation.aliased)
    for phase, found in phase_totals(step).items():
        if phase != "step" or case["stage"] == 3:  # the norm's pieces of a partition that starts within a weight
            assert found - seen == row["phase_rounded"][phase] - row["workspaces"] - row["inputs"], phase


def test_the_report_is_for_the_whole_sequence() -> None:
    report = estimate(SPEC, TrainingSetup(seq_len=1024, gpus=8, sequence_parallel_size=4))
    assert report.cluster is not None
    assert (report.cluster.sequences_per_step, report.cluster.tokens_per_step) == (2, 2048)
    assert report.cluster.parallel == "zero3"
    assert report.cluster.axes == {"data parallel": 2, "sequence parallel": 4}
    assert report.cluster.sent_bytes["all-to-all"] > 0
    assert [rank.count for rank in report.ranks] == [8]


def test_one_rank_is_zero_alone() -> None:
    alone = TrainingSetup(seq_len=512, gpus=2, parallel="zero2")
    one = TrainingSetup(seq_len=512, gpus=2, parallel="zero2", sequence_parallel_size=1)
    assert estimate(SPEC, alone).peak == estimate(SPEC, one).peak


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"seq_len": 1026, "sequence_parallel_size": 4}, "does not divide sequences of 1026"),
        ({"sequence_parallel_size": 2, "padding_mask": True}, "without masks"),
        ({"sequence_parallel_size": 2, "parallel": "fsdp2", "gpus": 2}, "fsdp2 has no --sequence-parallel-size"),
        ({"sequence_parallel_size": 2, "objective": "dpo"}, "--objective sft"),
        ({"seq_len": 1020, "sequence_parallel_size": 5}, "does not divide the 12 heads"),
        ({"sequence_parallel_size": 2, "context_parallel_size": 2}, "has no --context-parallel-size"),
    ],
)
def test_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        estimate(SPEC, TrainingSetup(**options))
