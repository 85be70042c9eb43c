"""Published figures of sharded training."""

import pytest

from memcalc.autograd.tape import GRADIENTS, OPTIMIZER, WEIGHTS
from memcalc.breakdown import BREAKDOWN
from memcalc.models.spec import ModelSpec
from memcalc.parallel.setup import ParallelSetup
from memcalc.setup.setup import TrainingSetup
from memcalc.training.step import trace

GPT_7_5B = {
    "model_type": "llama",
    "vocab_size": 50304,
    "hidden_size": 4096,
    "intermediate_size": 16384,
    "num_hidden_layers": 28,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "tie_word_embeddings": True,
    "architectures": ["LlamaForCausalLM"],
}


@pytest.mark.parametrize(("engine", "gigabytes"), [("zero1", 31.4), ("zero2", 16.6), ("zero3", 1.9)])
def test_zero_paper(engine: str, gigabytes: float) -> None:
    """Rajbhandari et al. 2020 (arXiv:1910.02054), figure 1: 7.5B parameters on 64 GPUs, K = 12.

    Stage 1 keeps the whole gradients, 2 bytes a parameter, until the last backward is over, so they are added here.
    """
    setup = TrainingSetup(precision="bf16", seq_len=16)
    step = trace(ModelSpec.from_config(GPT_7_5B), setup, layout=ParallelSetup(engine, data=64))  # type: ignore[arg-type]
    parameters = sum(p.numel * p.copies for _, p in step.parameters)
    phase = "step"
    held = sum(nbytes for row in (WEIGHTS, OPTIMIZER) for _, nbytes in BREAKDOWN[row](step, phase))
    gradients = 2 * parameters if engine == "zero1" else 2 * parameters / 64
    assert (held + gradients) * 7.5e9 / parameters / 1e9 == pytest.approx(gigabytes, rel=0.02)
    own = sum(nbytes for _, nbytes in BREAKDOWN[GRADIENTS](step, phase))
    assert own >= 2 * parameters / 64 or engine != "zero3"


@pytest.mark.parametrize("ranks", [2, 8, 64])
def test_megatrons_distributed_optimizer(ranks: int) -> None:
    """Megatron-LM, docs/user-guide/features/dist_optimizer.md: bf16 with fp32 gradients takes 6 + 12 / d bytes."""
    setup = TrainingSetup(seq_len=16)
    step = trace(ModelSpec.from_config(GPT_7_5B), setup, layout=ParallelSetup("megatron", data=ranks))
    parameters = sum(p.numel * p.copies for _, p in step.parameters)
    held = sum(nbytes for row in (WEIGHTS, OPTIMIZER, GRADIENTS) for _, nbytes in BREAKDOWN[row](step, "step"))
    assert held / parameters == pytest.approx(6 + 12 / ranks, rel=1e-3)
