"""Options to layouts: what multiplies, what follows, and what is refused in one sentence."""

from typing import Any

import pytest
from parallel.test_laws import CONFIGS

from memcalc.errors import UsageError
from memcalc.models.spec import ModelSpec
from memcalc.parallel.layout import layout_of
from memcalc.parallel.setup import SINGLE
from memcalc.setup.setup import TrainingSetup
from memcalc.training.step import trace


def layout(**options: Any) -> Any:
    return layout_of(TrainingSetup(**options), {"hidden_size": 64})


def test_all_gpus_are_data_parallel_unless_said_otherwise() -> None:
    assert (layout(gpus=8).engine, layout(gpus=8).data) == ("ddp", 8)
    both = layout(gpus=64, parallel="fsdp2", tensor_parallel_size=4, data_parallel_replicas=2)
    assert (both.data, both.tensor, both.replicas, both.gpus) == (8, 4, 2, 64)


@pytest.mark.parametrize("engine", ["ddp", "fsdp2", "fsdp1"])
def test_one_gpu_is_one_gpu_whatever_the_engine(engine: str) -> None:
    assert layout(gpus=1, parallel=engine) == SINGLE


@pytest.mark.parametrize("engine", ["zero1", "zero2", "zero3"])
def test_deepspeed_is_deepspeed_on_one_gpu(engine: str) -> None:
    """Its fp32 master weights and flat buffers are there for a lone rank too: rows of `distributed/zero.jsonl`."""
    assert (layout(gpus=1, parallel=engine).engine, layout(gpus=1, parallel=engine).gpus) == (engine, 1)


def test_auto_is_filled_as_hf_trainer_fills_it() -> None:
    zero = layout(gpus=8, parallel="zero3", zero_auto=True).zero
    assert zero.reduce_bucket_size == 64 * 64
    assert zero.stage3_prefetch_bucket_size == int(0.9 * 64 * 64)
    assert zero.stage3_param_persistence_threshold == 640
    assert layout(gpus=8, parallel="zero2", zero_auto=True, zero_reduce_bucket_size=7).zero.reduce_bucket_size == 7


def test_the_order_of_options_does_not_matter() -> None:
    options = {"gpus": 16, "parallel": "fsdp2", "tensor_parallel_size": 2, "fsdp_wrap": "plan"}
    assert layout(**options) == layout(**dict(reversed(options.items())))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"gpus": 6, "data_parallel_size": 4}, "multiply to 4 GPUs, but --gpus is 6"),
        ({"gpus": 6, "tensor_parallel_size": 4}, "no multiple of the 4 GPUs"),
        ({"gpus": 8, "parallel": "zero3", "pipeline_parallel_size": 2}, "zero3 has no --pipeline-parallel-size"),
        ({"gpus": 8, "parallel": "ddp", "tensor_parallel_size": 2}, "ddp has no --tensor-parallel-size"),
        ({"gpus": 8, "parallel": "ddp", "fsdp_wrap": "plan"}, "--fsdp-wrap belongs to --parallel fsdp2 or fsdp1"),
        ({"gpus": 8, "parallel": "zero2", "zero_stage3_max_live_parameters": 5}, "belongs to --parallel zero3"),
        ({"gpus": 8, "parallel": "zero2", "cpu_offload": "parameters"}, "keeps whole parameters"),
        ({"gpus": 8, "parallel": "zero2", "cpu_offload": "states"}, "--cpu-offload cannot be 'states'"),
        ({"gpus": 8, "parallel": "none"}, "leaves 8 ranks"),
        ({"gpus": 8, "optimizer_in_backward": True}, "needs all gradients"),
        ({"gpus": 8, "parallel": "ddp", "context_parallel_size": 2}, "ddp has no --context-parallel-size"),
        ({"microbatches": 4}, "--microbatches is about pipelines"),
        ({"pipeline_parallel_size": 2, "virtual_pipeline_size": 2}, "belongs to --pipeline-schedule interleaved"),
        ({"pipeline_parallel_size": 2, "pipeline_rank": 2}, "none of the 2 ranks"),
        ({"pipeline_parallel_size": 2, "grad_accum": 2}, "--microbatches does"),
        ({"pipeline_parallel_size": 2, "keep_logits": True}, "--pipeline-keep-outputs says"),
        ({"gpus": 8, "parallel": "zero2", "optimizer": "muon"}, "--optimizer muon works on whole matrices"),
        ({"gpus": 8, "parallel": "fsdp2", "optimizer": "galore-adamw"}, "use --parallel ddp"),
        ({"gpus": 8, "parallel": "megatron", "optimizer": "apollo-adamw"}, "use --parallel ddp"),
        ({"gpus": 8, "parallel": "megatron", "float8_recipe": "tensorwise"}, "not beside --parallel megatron"),
        ({"gpus": 8, "parallel": "zero2", "zero_sub_group_size": 5}, "belongs to --parallel zero3"),
        ({"gpus": 8, "parallel": "zero3", "zero_round_robin_gradients": True}, "zero1 or zero2, not to zero3"),
        ({"expert_imbalance": 2.0}, "add --expert-parallel-size"),
        ({"gpus": 8, "sync_every_micro_step": True}, "add --grad-accum"),
        ({"gpus": 8, "ranks": "all"}, "--ranks is about pipelines"),
    ],
)
def test_what_no_library_does_is_refused_by_name(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words) as problem:
        layout(**options)
    assert "\n" not in str(problem.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tensor_parallel_size": 3}, "does not divide the"),
        ({"tensor_parallel_size": 4}, "does not divide the 2 key-value heads"),
        ({"pipeline_parallel_size": 6}, "6 stages of 5 blocks"),
        ({"gpus": 4, "parallel": "fsdp2", "expert_parallel_size": 2}, "which this model has none of"),
    ],
)
def test_what_the_model_cannot_is_refused(options: dict[str, Any], words: str) -> None:
    from memcalc.peak.ranks import traced_ranks

    setup, spec = TrainingSetup(**options), ModelSpec.from_config(CONFIGS["llama"])
    with pytest.raises(UsageError, match=words):
        traced_ranks(spec, setup, layout_of(setup, spec.config), None)


def test_a_model_that_is_no_plain_decoder_has_no_stages() -> None:
    setup, spec = TrainingSetup(pipeline_parallel_size=2), ModelSpec.from_config(CONFIGS["t5"])
    with pytest.raises(UsageError, match="one stack of blocks"):
        trace(spec, setup, layout=layout_of(setup).__class__(pipeline=2, stage=0))
