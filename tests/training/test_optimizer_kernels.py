"""What PyTorch's kernels allocate in an optimizer's step, measured in its caching allocator on an H100."""

from typing import Any

import pytest
from support.measured_rows import standing

from memcalc import ModelSpec, TrainingSetup
from memcalc.tables.cuda_devices import CudaDevice
from memcalc.training.step import trace
from memcalc.training.traced_step import Tracing

LLAMA = {
    "model_type": "llama",
    "vocab_size": 5008,
    "hidden_size": 384,
    "intermediate_size": 1056,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}


@pytest.mark.parametrize(("batch", "seq_len", "step"), [(2, 320, 117_462_528 - 67_108_864)])
def test_adafactor_reduces_the_columns_of_its_largest_matrix(batch: int, seq_len: int, step: int) -> None:
    """15,532,032 bytes for the norms of 384 columns of 5,008 rows: partial results of blocks that share a column."""
    options: dict[str, Any] = {"precision": "bf16", "optimizer": "adafactor", "optimizer_impl": "for-loop"}
    setup = TrainingSetup(batch=batch, seq_len=seq_len, **options)
    known, unknown = (
        standing(trace(ModelSpec.from_config(LLAMA), setup, tracing=Tracing(device=device)), "step")
        for device in (CudaDevice((9, 0), 132), None)
    )
    assert known == pytest.approx(step, abs=8192)
    assert known - unknown > 11_000_000
