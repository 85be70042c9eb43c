"""Loops over tokens: a few of them are run, and the answer is that of running them all."""

from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest
from support.measured_rows import answer

from memcalc.autograd.tape import Tape
from memcalc.nn.layers.recurrent.token_loop import EXACT
from memcalc.training.step import _trace

MAMBA = {"model_type": "mamba", "vocab_size": 70, "hidden_size": 64, "state_size": 8, "num_hidden_layers": 2}
RWKV = {"model_type": "rwkv", "vocab_size": 70, "hidden_size": 64, "num_hidden_layers": 3, "rescale_every": 2}
GRIFFIN = {
    "model_type": "recurrent_gemma",
    "vocab_size": 70,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
}
GATED_DELTA = {
    "model_type": "qwen3_next",
    "vocab_size": 70,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
LIGHTNING = {
    "model_type": "minimax",
    "vocab_size": 70,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "block_size": 5,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
LOOPS = {
    "nn.layers.recurrent.mamba1": (MAMBA, 1),
    "models.families.recurrent.rwkv": (RWKV, 1),
    "nn.layers.recurrent.rg_lru": (GRIFFIN, 1),
    "nn.layers.recurrent.gated_delta_rule": (GATED_DELTA, 64),
    "models.families.moe.minimax": (LIGHTNING, 5),
}
"""Where each loop is, a model that runs it, and the tokens of one turn."""
OPTIONS: dict[str, dict[str, Any]] = {
    "bf16": {"recipe": "bf16"},
    "mixed": {"recipe": "bf16-mixed"},
    "fp32": {"recipe": "fp32"},
    "checkpointed": {"recipe": "bf16", "ckpt": True},
    "inference": {"mode": "infer"},
    "chunked prefill": {"mode": "infer", "options": {"prefill_chunk_size": 4 * EXACT}},
}


def every_token(tape: Tape, length: int) -> Iterator[int]:
    yield from [1] * length


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("loop", LOOPS)
def test_few_tokens_answer_for_all(loop: str, options: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config, turn = LOOPS[loop]
    case = {"config": config, "batch": 2, "seq": 4 * EXACT * turn - turn // 2, **OPTIONS[options]}
    quick = answer(case)
    _trace.cache_clear()
    monkeypatch.setattr(import_module(f"memcalc.{loop}"), "token_steps", every_token)
    assert answer(case) == quick
    _trace.cache_clear()
