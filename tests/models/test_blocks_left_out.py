"""Nemotron's blocks: as Llama's where all are alike, and with nothing in place of what a block leaves out."""

from typing import Any

import pytest

from memcalc import InferenceSetup, ModelSpec, TrainingSetup, estimate
from memcalc.errors import ConfigError

SIZES: dict[str, Any] = {
    "vocab_size": 1000,
    "hidden_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "max_position_embeddings": 512,
}
LLAMA = ModelSpec.from_config(
    {"model_type": "llama", "num_key_value_heads": 2, "intermediate_size": 768, "tie_word_embeddings": False, **SIZES}
)
ATTENTION: dict[str, Any] = {"n_heads_in_group": 3}
NONE: dict[str, Any] = {"no_op": True}
MLP: dict[str, Any] = {"ffn_mult": 3.0}


def nas(*blocks: tuple[dict[str, Any], dict[str, Any]]) -> ModelSpec:
    """A model of these blocks: attention and MLP of each."""
    given = [{"attention": attention, "ffn": ffn} for attention, ffn in blocks]
    return ModelSpec.from_config({"model_type": "nemotron-nas", **SIZES, "block_configs": given})


@pytest.mark.parametrize(
    "setup",
    [TrainingSetup(seq_len=96), TrainingSetup(lora_rank=8, lora_targets="all-linear"), InferenceSetup(seq_len=96)],
)
def test_blocks_that_are_all_alike_are_llamas(setup: TrainingSetup | InferenceSetup) -> None:
    assert estimate(nas(*[(ATTENTION, MLP)] * 4), setup).phases == estimate(LLAMA, setup).phases


def test_a_block_without_attention_keeps_no_cache_and_saves_nothing_for_it() -> None:
    whole, less = nas(*[(ATTENTION, MLP)] * 4), nas(*[(ATTENTION, MLP), (NONE, MLP)] * 2)
    served = [estimate(spec, InferenceSetup(seq_len=96)).kv_cache_bytes or 0 for spec in (whole, less)]
    assert served[1] * 2 == served[0]
    trained = [estimate(spec, TrainingSetup(seq_len=96)).saved_for_backward_bytes or 0 for spec in (whole, less)]
    assert trained[1] < trained[0]


def test_a_block_may_lack_its_mlp_or_have_one_matrix() -> None:
    counts = [
        estimate(nas(*[(ATTENTION, MLP)] * 3, last), TrainingSetup()).model.parameters.total
        for last in ((ATTENTION, MLP), (ATTENTION, NONE), (ATTENTION, {"replace_with_linear": True}))
    ]
    assert counts[0] - counts[1] == 3 * 384 * 768 + 384
    assert counts[2] - counts[1] == 384 * 384 + 384


def test_as_many_blocks_as_layers() -> None:
    with pytest.raises(ConfigError, match="3 'block_configs' but 4"):
        estimate(nas(*[(ATTENTION, MLP)] * 3), TrainingSetup())
