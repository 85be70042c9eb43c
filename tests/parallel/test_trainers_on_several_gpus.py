"""TRL's trainers on several GPUs, against TRL 1.16 and Accelerate 1.15 on rank 0 of two with PyTorch's real allocator.

Rows are those of `trainers.jsonl` with `parallel`: FSDP2 as Accelerate prepares it (its policy, autocast and wrapping),
where TRL shards a reference model by one `fully_shard` of the whole; or DistributedDataParallel.
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

KNOWN = {"3:fsdp2-dpo": {"forward": -3_972_096}, "5:fsdp2-dpo": {"forward": -8704}}
"""Bytes that an answer has more: in the pass without adapters, a gathered block and its input (not found yet whose);
and scalars of log-probabilities in bf16."""
SCALARS = 4096
"""Bytes of log-probabilities and statistics by row of the batch that are not traced (as on one GPU)."""


@pytest.mark.parametrize(("name", "row"), list(zip(NAMES, ROWS, strict=True)), ids=NAMES)
def test_every_phase(name: str, row: dict[str, Any]) -> None:
    found = answer(row["case"], parallel=row["parallel"], gpus=2)
    for phase, nbytes in found.items():
        expected = row["phase_rounded"][phase] - row["workspaces"] + KNOWN.get(name, {}).get(phase, 0)
        assert abs(nbytes - expected) <= SCALARS, phase


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
        ({"objective": "dpo", "parallel": "zero3"}, "frozen model of --objective dpo"),
        ({"objective": "dpo", "parallel": "fsdp1"}, "frozen model of --objective dpo"),
        ({"objective": "ppo", "parallel": "fsdp2"}, "which trains two models"),
        ({"objective": "dpo", "parallel": "megatron"}, "--objective sft alone"),
    ],
)
def test_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        estimate(ModelSpec.from_config(LLAMA), TrainingSetup(gpus=2, **options))
