"""Sequences that several GPUs share, against torch's `context_parallel` with FSDP2 on PyTorch's real allocator.

Each row is one rank, prepared as Accelerate does; live tensors are counted rounded to 512 bytes.
"""

import json
from dataclasses import replace
from typing import Any

import pytest
from support.paths import DATA

from memcalc import ModelSpec, TrainingSetup, canonical_spec, estimate
from memcalc.errors import UsageError
from memcalc.ops.attention_kernels import TRACKERS_DEVICE
from memcalc.parallel.layout import layout_of
from memcalc.peak.ranks import phase_totals
from memcalc.tables.cuda_devices import CudaDevice
from memcalc.training.step import trace
from memcalc.training.traced_step import Step, Tracing

ROWS = [json.loads(line) for line in (DATA / "context_parallel.jsonl").read_text().splitlines()]
PRECISIONS = {"bf16-mixed": "mixed-bf16"}
FLASH = CudaDevice((8, 0), 132)
"""A GPU of the rows' kind that takes flash attention, as they were told to."""


_ADAPTERS = {"lora_targets": "all-linear", "lora_dtype": "fp32"}


def setup_of(case: dict[str, Any]) -> TrainingSetup:
    return TrainingSetup(
        batch=case["batch"],
        seq_len=case["seq"],
        precision=PRECISIONS.get(case["recipe"], case["recipe"]),
        activation_checkpointing="full" if case.get("ckpt") else "none",
        gpus=case.get("world", case["cp"]),
        parallel="fsdp2",
        context_parallel_size=case["cp"],
        context_parallel_rotate_method=case.get("rotate", "allgather"),
        **({"lora_rank": case["lora"]["r"], **_ADAPTERS} if case.get("lora") else {}),
    )


def step_of(case: dict[str, Any]) -> Step:
    spec, setup = ModelSpec.from_config(case["config"]), setup_of(case)
    device = TRACKERS_DEVICE if case["sdpa"] is None else FLASH
    layout = replace(layout_of(setup, spec.config), context_rank=case.get("rank", 0))
    return trace(spec, setup, layout=layout, tracing=Tracing(device=device))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: "-".join(str(row["case"].get(key)) for key in ("cp", "recipe")))
def test_every_phase_to_the_byte(row: dict[str, Any]) -> None:
    case = row["case"]
    step = step_of(case)
    seen = sum(allocation.nbytes for allocation in step.tape.inputs if allocation.aliased)
    whole = 8 * case["batch"] * case["seq"]
    inputs = 4 * whole + 5 * whole // case["cp"]
    assert step.input_bytes == inputs - seen
    for phase, found in phase_totals(step).items():
        standing = row["workspaces"] + (4 * whole if phase == "step" else inputs)  # the parts of the batch are gone
        if not (phase == "step" and case.get("lora") and case.get("ckpt")):  # that loop held leaves of its graph
            assert found - seen == row["phase_rounded"][phase] - standing, phase


def test_beside_tensor_parallel_to_the_byte() -> None:
    """FSDP2 over two ranks that share sequences, each of two that share layers by Transformers' plan."""
    row = json.loads((DATA / "context_and_tensor_parallel.jsonl").read_text())
    case = row["case"]
    setup = TrainingSetup(
        batch=2,
        seq_len=512,
        precision="bf16",
        optimizer_impl="foreach",
        parallel="fsdp2",
        context_parallel_size=case["cp"],
        tensor_parallel_size=case["tp"],
    )
    spec = ModelSpec.from_config(case["config"])
    step = trace(spec, setup, layout=layout_of(setup, spec.config), tracing=Tracing(device=FLASH))
    whole = 8 * 2 * 512
    parts = 3 * whole // 2
    batch = 4 * whole + parts - whole // 2  # the tape counts the part of the ids that the embedding looks up
    inputs = {"forward": batch, "backward": batch, "step": whole + parts + 512}  # by then the batch is cut in place
    for phase, found in phase_totals(step).items():
        assert found == row["phase_rounded"][phase] - row["workspaces"] - inputs[phase], phase


def test_one_rank_is_a_single_gpu() -> None:
    spec = canonical_spec(10**8)[0]
    alone, one = TrainingSetup(seq_len=512), TrainingSetup(seq_len=512, context_parallel_size=1)
    assert estimate(spec, alone).peak == estimate(spec, one).peak


def test_the_report_is_for_the_whole_sequence() -> None:
    report = estimate(canonical_spec(10**8)[0], TrainingSetup(seq_len=1024, gpus=8, context_parallel_size=4))
    assert report.setup["seq_len"] == 1024
    assert report.cluster is not None
    assert (report.cluster.sequences_per_step, report.cluster.tokens_per_step) == (2, 2048)
    assert report.cluster.parallel == "fsdp2"
    assert report.cluster.axes == {"data parallel": 2, "context parallel": 4}
    assert report.cluster.sent_bytes["all-gather"] > 0
    assert any(assumption.code == "context_parallel" for assumption in report.assumptions)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"seq_len": 1026, "context_parallel_size": 2}, "no multiple of 4"),
        ({"context_parallel_rotate_method": "alltoall"}, "add --context-parallel-size"),
        ({"context_parallel_size": 2, "padding_mask": True}, "without masks"),
        ({"context_parallel_size": 2, "attention": "eager"}, "attends with sdpa"),
        ({"context_parallel_size": 2, "parallel": "ddp", "gpus": 2}, "ddp has no --context-parallel-size"),
        ({"context_parallel_size": 2, "pipeline_parallel_size": 2, "gpus": 4}, "not beside pipelines or experts"),
        ({"context_parallel_size": 2, "tensor_parallel_size": 2, "sequence_parallel": True}, "Transformers' plan"),
        ({"context_parallel_size": 2, "objective": "dpo"}, "--objective sft"),
    ],
)
def test_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        estimate(canonical_spec(10**8)[0], TrainingSetup(**options))


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "bert", "architectures": ["BertForMaskedLM"]},
        {"model_type": "mistral", "sliding_window": 64, "num_hidden_layers": 2},
        {"model_type": "t5"},
    ],
    ids=lambda config: config["model_type"],
)
def test_models_that_do_not_attend_causally_are_refused(config: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="context"):
        estimate(ModelSpec.from_config(config), TrainingSetup(seq_len=256, gpus=2, context_parallel_size=2))
