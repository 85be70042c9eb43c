"""Serving engines over several GPUs: stages, copies, experts, and data parallel attention."""

from typing import Any

import pytest
from support.cli_runs import answer, refused
from support.reports import lines

from memcalc import InferenceSetup, ModelSpec, estimate
from memcalc.errors import UsageError
from memcalc.parallel.serving_layout import stage_blocks

LLAMA = {
    "model_type": "llama",
    "hidden_size": 1024,
    "num_hidden_layers": 10,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "intermediate_size": 2816,
    "vocab_size": 32000,
    "max_position_embeddings": 8192,
}
MIXTURE = {
    **LLAMA,
    "model_type": "qwen3_moe",
    "head_dim": 64,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 512,
}
MIXTRAL = {**LLAMA, "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
LATENT = {
    "model_type": "deepseek_v3",
    "hidden_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "first_k_dense_replace": 1,
    "intermediate_size": 1024,
    "moe_intermediate_size": 256,
    "n_routed_experts": 16,
    "num_experts_per_tok": 2,
    "n_group": 4,
    "topk_group": 2,
    "q_lora_rank": 128,
    "kv_lora_rank": 64,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "vocab_size": 4096,
}

SGLANG = {"engine": "sglang", "tensor_parallel_size": 4}


def report(config: dict[str, Any], gpu: Any = None, **options: Any) -> Any:
    options = {"engine": "vllm", "dtype": "bf16", **options}
    return estimate(ModelSpec.from_config(config), InferenceSetup(**options), gpu)


def group(found: Any, name: str) -> int:
    return sum(part.bytes for part in found.components.model_weights.parts if part.name.endswith(name))


@pytest.mark.parametrize(
    ("depth", "stages", "sizes"),
    [(8, 2, [4, 4]), (9, 2, [5, 4]), (10, 4, [2, 3, 3, 2]), (11, 4, [3, 3, 3, 2]), (61, 8, [7, 7, 8, 8, 8, 8, 8, 7])],
)
def test_blocks_of_stages(depth: int, stages: int, sizes: list[int]) -> None:
    """vLLM's rule: the rest goes to stages before the last, and not to the first where there are enough between."""
    assert [len(stage_blocks(depth, stages, index)) for index in range(stages)] == sizes
    assert [block for index in range(stages) for block in stage_blocks(depth, stages, index)] == list(range(depth))


@pytest.mark.parametrize(
    "config", [LLAMA, {**LLAMA, "tie_word_embeddings": True}, MIXTURE], ids=["llama", "tied", "moe"]
)
def test_stages_together_are_the_model(config: dict[str, Any]) -> None:
    whole = report(config)
    found = report(config, pipeline_parallel_size=3, ranks="all")
    tied = group(whole, "embedding") if config.get("tie_word_embeddings") else 0
    buffers = 3 * group(whole, "buffers")  # every stage has the rotary table
    held = sum(rank.model_weights_bytes for rank in found.ranks)
    assert held == whole.components.model_weights.peak_bytes + tied + buffers - group(whole, "buffers")
    assert found.model.parameters == whole.model.parameters
    assert found.cluster.axes == {"pipeline stages": 3}
    assert [rank.pipeline_rank for rank in found.ranks] == [0, 1, 2]


def test_a_size_of_one_is_one_gpu() -> None:
    one = report(MIXTURE, "24GB")
    same = report(MIXTURE, "24GB", pipeline_parallel_size=1, data_parallel_size=1, expert_parallel_size=1, gpus=1)
    assert (same.peak, same.serving, same.cluster) == (one.peak, one.serving, None)


def test_the_stage_with_least_room_decides_what_is_served() -> None:
    """Two stages hold half of the blocks each: a token needs half of the bytes, and the pool lasts for more."""
    one, two = report(LLAMA, "24GB"), report(LLAMA, "24GB", pipeline_parallel_size=2)
    assert two.kv_cache_bytes * 2 == one.kv_cache_bytes
    assert 1.8 < two.serving.pool.pool_tokens / one.serving.pool.pool_tokens < 2.3


@pytest.mark.parametrize("config", [MIXTURE, MIXTRAL], ids=["qwen3_moe", "mixtral"])
@pytest.mark.parametrize(
    ("options", "ranks"),
    [
        ({"tensor_parallel_size": 2, "enable_expert_parallel": True}, 2),
        ({"tensor_parallel_size": 2, "data_parallel_size": 2, "enable_expert_parallel": True}, 4),
        ({"data_parallel_size": 4}, 4),
        ({"engine": "sglang", "tensor_parallel_size": 4, "expert_parallel_size": 2}, 4),
        ({"engine": "sglang", "tensor_parallel_size": 4, "data_parallel_size": 4, "enable_dp_attention": True}, 4),
    ],
)
def test_experts_are_shared_by_all_ranks(config: dict[str, Any], options: dict[str, Any], ranks: int) -> None:
    """But for the routers, which every GPU has."""
    assert group(report(config, **options), "experts") * ranks == pytest.approx(
        group(report(config), "experts"), rel=0.003
    )


def test_experts_that_do_not_divide() -> None:
    """vLLM gives some GPUs one expert more: the report is for one of those."""
    found = report({**MIXTURE, "num_experts": 15}, data_parallel_size=4, enable_expert_parallel=True)
    whole = group(report({**MIXTURE, "num_experts": 15}), "experts")
    assert group(found, "experts") * 15 == pytest.approx(4 * whole, rel=0.003)


def test_data_parallel_attention_keeps_a_cache_of_its_own() -> None:
    """Attention is whole in each group, and each caches its own sequences; without it all cache the latent of all."""
    plain = report(LATENT, engine="sglang", tensor_parallel_size=4)
    apart = report(LATENT, engine="sglang", tensor_parallel_size=4, data_parallel_size=4, enable_dp_attention=True)
    assert group(apart, "attention") == group(report(LATENT), "attention") > group(plain, "attention")
    assert apart.kv_cache_bytes == plain.kv_cache_bytes
    assert (apart.cluster.gpus, apart.cluster.axes["data parallel attention"]) == (4, 4)
    assert (apart.cluster.sequences_per_step, plain.cluster.sequences_per_step) == (4, 1)


def test_what_is_sent_and_where_buffers_are() -> None:
    found = report(LLAMA, tensor_parallel_size=2, pipeline_parallel_size=2, seq_len=100)
    sent = {"all-reduce": 2 * 5 * 101 * 2048, "send to the next stage": 2 * 101 * 2048}
    assert found.cluster.sent_bytes == (
        sent if found.cluster.pipeline_rank == 0 else {"all-reduce": sent["all-reduce"]}
    )
    assert any("NCCL buffers" in line for line in lines(found))


@pytest.mark.parametrize(
    ("config", "options", "sentence"),
    [
        (LLAMA, {"pipeline_parallel_size": 11}, "no more stages than blocks"),
        (LLAMA, {"pipeline_parallel_size": 2, "engine": "tgi"}, "tgi has no --pipeline-parallel-size"),
        (LLAMA, {"data_parallel_size": 2, "engine": "transformers"}, "transformers has no --data-parallel-size"),
        (LLAMA, {"enable_dp_attention": True}, "vllm has no --enable-dp-attention"),
        (LLAMA, {"gpus": 6, "tensor_parallel_size": 4}, "multiply to 4"),
        (LLAMA, {"tensor_parallel_size": 3}, "does not divide the 16 attention heads"),
        (LLAMA, {"ranks": "all"}, "lists the stages of a pipeline"),
        (
            MIXTURE,
            {"engine": "sglang", "tensor_parallel_size": 4, "expert_parallel_size": 3},
            "does not divide the 4 GPUs",
        ),
        (MIXTURE, {"tensor_parallel_size": 2, "expert_parallel_size": 4}, "vLLM spreads experts over all 2 GPUs"),
        (MIXTURE, SGLANG | {"enable_dp_attention": True}, "but that is 1"),
        (MIXTURE, {"data_parallel_size": 3}, "do not divide over 3 GPUs"),
    ],
)
def test_refused(config: dict[str, Any], options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        report(config, **options)


def test_a_dense_model_has_no_experts_to_spread() -> None:
    found = report(LLAMA, tensor_parallel_size=2, enable_expert_parallel=True)
    assert any("no experts to spread" in line for line in lines(found))


def test_at_the_command_line() -> None:
    options = (
        "--mode",
        "inference",
        "--engine",
        "vllm",
        "--tensor-parallel-size",
        "8",
        "--pipeline-parallel-size",
        "2",
    )
    found = answer("estimate", "70B", *options, "--gpu", "H100-80GB", "--seq-len", "8192")
    assert (found["cluster"]["gpus"], found["cluster"]["parallel"]) == (16, "vllm")
    assert "--expert-parallel-size" in refused(2, "estimate", "70B", *options[:4], "--expert-parallel-size", "0")
