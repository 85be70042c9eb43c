"""Laws of the layouts: what must hold of any model."""

from typing import Any

import pytest

from memcalc.autograd.tape import GRADIENTS, OPTIMIZER, WEIGHTS
from memcalc.breakdown import BREAKDOWN
from memcalc.estimation.estimate import estimate
from memcalc.models.spec import ModelSpec
from memcalc.nn.layers.equal_pieces import Repeat
from memcalc.nn.run_context import run_context
from memcalc.parallel.engine import replaced
from memcalc.parallel.setup import ParallelSetup, ZeroOptions
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


AXES: dict[str, list[dict[str, int]]] = {
    "ddp": [{"data": ranks} for ranks in (2, 8)],
    "fsdp2": [{"data": 8, "tensor": ranks} for ranks in (1, 2)] + [{"data": 8, "context": 4}],
    "none": [{"tensor": 2}],
    "megatron": [{"data": 8, "tensor": ranks} for ranks in (1, 2)],
}


@pytest.mark.parametrize("engine", AXES)
def test_no_axis_adds_weights_states_and_gradients(engine: str) -> None:
    """A rank of more of them never holds more, but for the rounding of shards; Megatron's single GPU is its own."""
    alone = ParallelSetup("megatron" if engine == "megatron" else "none")
    held = kept(run("llama", alone))
    for axes in AXES[engine]:
        step = run("llama", ParallelSetup(engine, **axes))  # type: ignore[arg-type]
        assert kept(step) <= held + 512 * 4 * len(step.parameters), axes


@pytest.mark.parametrize("ranks", [1, 2])
def test_tensor_ranks_of_megatron_together_are_the_model(ranks: int) -> None:
    """What is not divided is whole on every rank: the norms."""
    whole, part = (run("llama", ParallelSetup("megatron", tensor=size)) for size in (1, ranks))

    def elements(step: Step, *, norms: bool) -> int:
        return sum(p.numel * p.copies for _, p in step.parameters if (p.group == "norms") is norms)

    assert elements(part, norms=True) == elements(whole, norms=True)
    padded = -(-1000 // (128 * ranks)) * 128 * ranks - 1024  # the vocabulary is padded for all ranks
    assert ranks * elements(part, norms=False) == elements(whole, norms=False) + 2 * 64 * padded


def test_stages_of_megatron_together_are_the_model() -> None:
    from memcalc.peak.pipeline import trace_rank

    config = {**CONFIGS["llama"], "num_hidden_layers": 8}
    setup, spec = TrainingSetup(seq_len=64, precision="bf16"), ModelSpec.from_config(config)
    whole = trace(spec, setup, layout=ParallelSetup("megatron"))
    stages = [trace_rank(spec, setup, ParallelSetup("megatron", pipeline=4), rank) for rank in range(4)]
    count = [sum(p.numel * p.copies for _, p in step.parameters) for step in (whole, *stages)]
    assert sum(count[1:]) == count[0]


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


def test_a_size_of_1_on_every_axis_is_a_single_gpu() -> None:
    sizes = ("data", "tensor", "context", "sequence", "pipeline", "expert")
    ones: dict[str, Any] = {**{f"{axis}_parallel_size": 1 for axis in sizes}, "data_parallel_replicas": 1}
    spec = ModelSpec.from_config({"model_type": "qwen3", "num_hidden_layers": 2})
    assert estimate(spec, TrainingSetup(**ones)).peak == estimate(spec, TrainingSetup()).peak


def test_deep_models_gather_no_more_weights_ahead() -> None:
    def most(depth: int) -> int:
        spec = ModelSpec.from_config({**CONFIGS["llama"], "num_hidden_layers": depth})
        setup = TrainingSetup(seq_len=16, precision="bf16", activation_checkpointing="full")
        ahead = ZeroOptions(stage3_param_persistence_threshold=0, stage3_prefetch_bucket_size=50_000)
        step = trace(spec, setup, layout=ParallelSetup("zero3", data=4, zero=ahead))
        return Sweep(step.tape).peaks()[0]["backward"][0]

    assert most(44) < 1.5 * most(36)
