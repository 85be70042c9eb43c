"""Mamba layers in the kernels of mamba-ssm: what they keep, against what plain PyTorch takes."""

from typing import Any

import pytest
from support.reports import lines
from support.shapes import decoder

from memcalc import InferenceSetup, ModelSpec, TrainingSetup, estimate
from memcalc.errors import UsageError

GIB = 2**30

MAMBA_370M: dict[str, Any] = {
    "model_type": "mamba",
    "architectures": ["MambaForCausalLM"],
    "hidden_size": 1024,
    "num_hidden_layers": 48,
    "state_size": 16,
    "expand": 2,
    "conv_kernel": 4,
    "vocab_size": 50280,
    "time_step_rank": 64,
}
MAMBA2: dict[str, Any] = {
    "model_type": "mamba2",
    "hidden_size": 512,
    "num_hidden_layers": 4,
    "num_heads": 16,
    "head_dim": 64,
    "state_size": 64,
    "n_groups": 1,
    "vocab_size": 1000,
}


def training(config: dict[str, Any], **options: Any) -> Any:
    return estimate(ModelSpec.from_config(config), TrainingSetup.model_validate({"precision": "bf16", **options}))


def test_a_370m_mamba_fits_a_card() -> None:
    """Micro-batches of 8 x 2048 tokens took about 30 GiB; in plain PyTorch they would take hundreds."""
    options = {"precision": "mixed-bf16", "batch": 8, "seq_len": 2048}
    fused = training(MAMBA_370M, **options, state_space_kernels="mamba-ssm")
    plain = training(MAMBA_370M, **options)
    assert 27 * GIB < fused.peak.allocated_bytes < 33 * GIB
    assert plain.peak.allocated_bytes > 10 * fused.peak.allocated_bytes
    (line,) = (line for line in lines(plain) if "with mamba-ssm's kernels" in line)
    assert f"{fused.peak.allocated_bytes / GIB:.1f} GiB" in line


@pytest.mark.parametrize("config", [MAMBA_370M, MAMBA2], ids=["mamba", "mamba2"])
def test_what_the_kernels_keep(config: dict[str, Any]) -> None:
    """Of a Mamba 1 mixer 3 i + rank + 4 n values a token, of a Mamba 2 mixer its input and output."""
    config = config | {"num_hidden_layers": 4}
    tokens = 2 * 1024

    def saved(depth: int) -> int:
        found = training(config | {"num_hidden_layers": depth}, batch=2, seq_len=1024, state_space_kernels="mamba-ssm")
        assert found.saved_for_backward_bytes is not None
        return int(found.saved_for_backward_bytes)

    layer = saved(5) - saved(4)
    hidden = config["hidden_size"]
    around = 4 * hidden + 2 * hidden + 4 + 2 * hidden  # the norm's input in fp32, its result, a statistic, the input
    if config["model_type"] == "mamba":
        inner, state, rank = 2 * hidden, 16, 64
        kept = 2 * (3 * inner + rank + 4 * state)
        once = 4 * 2 * inner * 2 * state + 4 * (inner * state + 2 * inner)
    else:
        inner = 16 * 64
        kept = 2 * (inner + (2 * inner + 2 * 64 + 16)) + 4
        once = 0
    assert layer == pytest.approx(tokens * (kept + around) + once, rel=0.03)


def test_serving() -> None:
    spec = ModelSpec.from_config(MAMBA_370M)
    plain = estimate(spec, InferenceSetup(seq_len=4096))
    fused = estimate(spec, InferenceSetup(seq_len=4096, state_space_kernels="mamba-ssm"))
    assert fused.peak.allocated_bytes < plain.peak.allocated_bytes
    assert fused.kv_cache_bytes == plain.kv_cache_bytes


def test_where_there_are_no_such_layers() -> None:
    with pytest.raises(UsageError, match="Mamba layers"):
        training(decoder(64, 2, 4, 4, 128, 100), state_space_kernels="mamba-ssm")
    with pytest.raises(UsageError, match="adapter"):
        training(MAMBA2, state_space_kernels="mamba-ssm", quantization="nf4", lora_rank=4, lora_targets="in_proj")


@pytest.mark.parametrize("trained", ["last-1", "layers.2", "in_proj"])
def test_blocks_that_are_told_apart_keep_their_kernels(trained: str) -> None:
    """The kernels are what runs the blocks, whichever are trained: a step takes less than in plain PyTorch."""
    options = {"seq_len": 2048, "train_only": trained}
    plain, fused = training(MAMBA2, **options), training(MAMBA2, state_space_kernels="mamba-ssm", **options)
    assert fused.peak.allocated_bytes < 0.9 * plain.peak.allocated_bytes
