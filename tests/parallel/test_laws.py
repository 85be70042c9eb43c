"""Laws of the layouts: what must hold of any model."""

import pytest

from memcalc.autograd.tape import GRADIENTS, OPTIMIZER, WEIGHTS
from memcalc.breakdown import BREAKDOWN
from memcalc.models.spec import ModelSpec
from memcalc.nn.layers.equal_pieces import Repeat
from memcalc.nn.run_context import run_context
from memcalc.parallel.engine import replaced
from memcalc.parallel.setup import ParallelSetup
from memcalc.peak.sweep import Sweep
from memcalc.setup.setup import TrainingSetup
from memcalc.training.step import trace
from memcalc.training.traced_step import Step

CONFIGS = {
    "llama": {
        "model_type": "llama",
        "vocab_size": 1000,
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 5,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "architectures": ["LlamaForCausalLM"],
    },
    "t5": {
        "model_type": "t5",
        "vocab_size": 500,
        "d_model": 64,
        "d_kv": 16,
        "d_ff": 128,
        "num_layers": 4,
        "num_heads": 4,
        "architectures": ["T5ForConditionalGeneration"],
    },
}
KEPT = (WEIGHTS, OPTIMIZER, GRADIENTS)


def run(model: str, layout: ParallelSetup, **options: object) -> Step:
    setup = TrainingSetup(**{"batch": 2, "seq_len": 64, "precision": "bf16", **options})  # type: ignore[arg-type]
    return trace(ModelSpec.from_config(CONFIGS[model]), setup, layout=layout)


def kept(step: Step) -> int:
    """Weights, optimizer states and gradients in the optimizer's step."""
    return sum(nbytes for row in KEPT for _, nbytes in BREAKDOWN[row](step, "step"))


@pytest.mark.parametrize("model", CONFIGS)
def test_more_shards_never_hold_more(model: str) -> None:
    held = [kept(run(model, ParallelSetup("fsdp2", data=ranks))) for ranks in (1, 2, 3, 4, 8, 64)]
    assert held == sorted(held, reverse=True)


@pytest.mark.parametrize("model", CONFIGS)
def test_shards_together_are_the_model(model: str) -> None:
    """A first dimension that the ranks divide leaves no padding: only the alignment of shards is more."""
    alone = kept(run(model, ParallelSetup()))
    sharded = 4 * kept(run(model, ParallelSetup("fsdp2", data=4)))
    tensors = 4 * len(run(model, ParallelSetup()).parameters) * 5
    assert alone <= sharded <= alone + 4 * 512 * tensors


@pytest.mark.parametrize("ranks", [2, 8, 64])
def test_ddp_is_one_gpu_with_buckets(ranks: int) -> None:
    alone, copied = run("llama", ParallelSetup()), run("llama", ParallelSetup("ddp", data=ranks))
    found, more = (Sweep(step.tape).peaks()[0] for step in (alone, copied))
    assert {phase: found[phase][0] for phase in found} == {phase: more[phase][0] for phase in more}
    buckets = dict(BREAKDOWN["other_overhead"](copied, "step"))
    trained = sum(2 * p.numel * p.copies for _, p in alone.parameters)
    assert trained <= sum(buckets.values()) < trained + 512 * 4


@pytest.mark.parametrize("depth", [2, 5, 40])
def test_depth_costs_no_more_traced_blocks(depth: int) -> None:
    config = {**CONFIGS["llama"], "num_hidden_layers": depth}
    step = trace(ModelSpec.from_config(config), TrainingSetup(), layout=ParallelSetup("fsdp2", data=8))
    assert run_context(step.tape).traced_blocks <= 3


def test_more_images_than_a_vision_tower_runs_one_by_one() -> None:
    """Lengths of pieces go through FSDP2's hooks and the allocator's own run as they are."""
    replaced_lengths = replaced((Repeat((4, 8), 3), 5), {})
    assert replaced_lengths == (Repeat((4, 8), 3), 5)
    assert isinstance(replaced_lengths[0], Repeat)
