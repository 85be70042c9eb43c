"""Loops over tokens: a few of them are run, and the answer is that of running them all."""

from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest
from support.measured_rows import answer

from memcalc.autograd.tape import Tape
from memcalc.nn.layers.token_loop import EXACT
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
LOOPS = {"nn.layers.mamba1": MAMBA, "models.families.recurrent.rwkv": RWKV, "nn.layers.rg_lru": GRIFFIN}
OPTIONS: dict[str, dict[str, Any]] = {
    "bf16": {"recipe": "bf16"},
    "mixed": {"recipe": "bf16-mixed"},
    "fp32": {"recipe": "fp32"},
    "checkpointed": {"recipe": "bf16", "ckpt": True},
    "inference": {"mode": "infer"},
}


def every_token(tape: Tape, length: int) -> Iterator[int]:
    yield from [1] * length


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("loop", LOOPS)
def test_few_tokens_answer_for_all(loop: str, options: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = {"config": LOOPS[loop], "batch": 2, "seq": 4 * EXACT, **OPTIONS[options]}
    quick = answer(case)
    _trace.cache_clear()
    monkeypatch.setattr(import_module(f"memcalc.{loop}"), "token_steps", every_token)
    assert answer(case) == quick
    _trace.cache_clear()
