"""No part of a row is negative, whatever stood before the micro-batch that is traced."""

import pytest
from support.cli_runs import answer

LAYOUTS = ("--parallel ddp", "--parallel fsdp2", "--parallel fsdp2 --tensor-parallel-size 8")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_pipeline_has_no_negative_parts(layout: str) -> None:
    job = "estimate --params 405B --seq-len 4096 --activation-checkpointing full --gpus 512"
    job += " --pipeline-parallel-size 16 --microbatches 32"
    found = answer(*job.split(), *layout.split())
    parts = [part for row in found["components"].values() for part in row["parts"]]
    assert [part for part in parts if part["bytes"] < 0] == []
