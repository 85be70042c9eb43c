"""Trainers on several GPUs, against TRL 1.16, Accelerate 1.15 and DeepSpeed 0.19.6 on rank 0 of two.

Rows are those of `trainers.jsonl` with `parallel`, measured with PyTorch's real allocator: FSDP2 and FSDP1 as
Accelerate wraps models (TRL shards a reference model as a whole under FSDP2), DistributedDataParallel, or DeepSpeed,
whose step Accelerate takes inside of its backward.
"""

import json
from typing import Any

import pytest
from support.paths import DATA
from support.trainer_rows import answer

from memcalc import ModelSpec, TrainingSetup, estimate
from memcalc.errors import UsageError

ROWS = [json.loads(line) for line in (DATA / "trainers_on_several_gpus.jsonl").read_text().splitlines()]
NAMES = [f"{n}:{row['parallel']}-{row['case']['trainer']}" for n, row in enumerate(ROWS)]

SCALARS = 4608
"""Bytes of log-probabilities and statistics by row of the batch that are not traced (as on one GPU)."""
MORE = {
    "3:fsdp2-dpo": 16_384,
    "5:fsdp2-dpo": 9216,
    "10:zero3-dpo": 57_344,
    "14:fsdp1-hf": 16_384,
    "18:fsdp1-dpo": 1_966_592,
    "20:zero3-orpo": 43_008,
    "23:zero3-rloo": 22_016,
    "25:fsdp1-dpo": 16_384,
    "26:fsdp1-sft": 16_384,
    "27:zero3-grpo": 739_840,
    "31:fsdp2-dpo": 16_384,
    "32:fsdp1-dpo": 20_480,
}
"""More of them: casts of what a model returns, norms of FSDP1's clipping, statistics, small adapters; two hidden states
in the step of FSDP1 with LoRA, far below the peak; and, in the last, weights that a stale order lets stand (1.6 %)."""


def asked(row: dict[str, Any]) -> dict[str, Any]:
    """Options that a row stands for beside those of its case. DeepSpeed computes in bf16 without autocast."""
    more = {"parallel": row["parallel"], "gpus": 2}
    return more if "zero" not in row else {**more, "zero_auto": row["zero"] == "auto", "autocast": None}


@pytest.mark.parametrize(("name", "row"), list(zip(NAMES, ROWS, strict=True)), ids=NAMES)
def test_every_phase(name: str, row: dict[str, Any]) -> None:
    found = answer(row["case"], **asked(row))
    if "zero" in row:
        found["backward"] = max(found["backward"], found.pop("step"))
    for phase, nbytes in found.items():
        assert abs(nbytes - row["phase_rounded"][phase] + row["workspaces"]) <= MORE.get(name, SCALARS), phase


LLAMA = {"model_type": "llama", "num_hidden_layers": 2, "architectures": ["LlamaForCausalLM"]}


def held(objective: str, parallel: str, gpus: int) -> int:
    """Bytes of all weights of a rank at its peak."""
    setup = TrainingSetup(objective=objective, parallel=parallel, gpus=gpus, seq_len=64, precision="bf16")  # type: ignore[arg-type]
    return estimate(ModelSpec.from_config(LLAMA), setup).components.model_weights.peak_bytes


def test_zero_keeps_the_reference_whole_and_fsdp_shards_it() -> None:
    """TRL initializes a frozen model with stage 0 unless the trained one has stage 3 (`prepare_deepspeed`)."""
    alone, both = held("orpo", "zero2", 8), held("dpo", "zero2", 8)
    assert both == 2 * alone
    assert held("dpo", "fsdp2", 8) < both  # though the reference is gathered as a whole


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"objective": "ppo", "parallel": "fsdp2"}, "which trains two models"),
        ({"objective": "dpo", "parallel": "megatron"}, "--objective sft alone"),
    ],
)
def test_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        estimate(ModelSpec.from_config(LLAMA), TrainingSetup(gpus=2, **options))
