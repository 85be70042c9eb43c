"""Learned positions cannot be outgrown, which is an error; rotary ones can, which is a line under Assumptions."""

from typing import Any

import pytest
from support.reports import lines

from memcalc import InferenceSetup, ModelSpec, TrainingSetup, estimate, find_gpu
from memcalc.errors import UsageError

SMALL = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 70,
}
GPT2 = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 70, "n_positions": 48}
BERT = {**SMALL, "model_type": "bert", "max_position_embeddings": 48}
ROBERTA = {**SMALL, "model_type": "roberta", "max_position_embeddings": 50, "pad_token_id": 1}
LLAMA = {**SMALL, "model_type": "llama", "max_position_embeddings": 48}

OPT = {
    "model_type": "opt",
    "hidden_size": 64,
    "word_embed_proj_dim": 64,
    "num_hidden_layers": 2,
    "ffn_dim": 128,
    "num_attention_heads": 4,
    "vocab_size": 70,
    "max_position_embeddings": 48,
}
NEO = {
    "model_type": "gpt_neo",
    "hidden_size": 64,
    "num_layers": 2,
    "num_heads": 4,
    "vocab_size": 70,
    "max_position_embeddings": 48,
    "attention_types": [[["global", "local"], 1]],
}
BART = {
    "model_type": "bart",
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
    "vocab_size": 70,
    "max_position_embeddings": 48,
}

LEARNED: list[dict[str, Any]] = [
    GPT2,
    BERT,
    ROBERTA,
    OPT,
    NEO,
    BART,
    {**GPT2, "model_type": "gpt_bigcode"},
    {
        "model_type": "distilbert",
        "dim": 64,
        "n_layers": 2,
        "n_heads": 4,
        "hidden_dim": 128,
        "vocab_size": 70,
        "max_position_embeddings": 48,
    },
    {**BERT, "model_type": "albert", "embedding_size": 32},
    {**SMALL, "model_type": "mpnet", "max_position_embeddings": 50},
]


@pytest.mark.parametrize("config", LEARNED, ids=lambda config: config["model_type"])
def test_the_table_s_size_is_the_end(config: dict[str, Any]) -> None:
    spec = ModelSpec.from_config(config)
    estimate(spec, TrainingSetup(seq_len=48))
    with pytest.raises(UsageError, match=r"48 learned positions.* 49 .*--seq-len"):
        estimate(spec, TrainingSetup(seq_len=49))


def test_generation_ends_there_too() -> None:
    spec = ModelSpec.from_config(GPT2)
    estimate(spec, InferenceSetup(seq_len=48))
    estimate(spec, InferenceSetup(seq_len=40, max_new_tokens=9))
    with pytest.raises(UsageError, match="48 learned positions"):
        estimate(spec, InferenceSetup(seq_len=49))
    with pytest.raises(UsageError, match=r"49 tokens.*--max-new-tokens"):
        estimate(spec, InferenceSetup(seq_len=40, max_new_tokens=10))


@pytest.mark.parametrize("config", LEARNED, ids=lambda config: config["model_type"])
def test_a_length_that_nobody_named_is_no_longer_than_the_table(config: dict[str, Any]) -> None:
    report = estimate(ModelSpec.from_config(config), TrainingSetup())
    assert report.setup["seq_len"] == 48
    assert "sequence length 48 (default; --seq-len)" in lines(report)


def test_nor_with_the_tokens_that_are_to_come() -> None:
    spec = ModelSpec.from_config(GPT2)
    assert estimate(spec, InferenceSetup(max_new_tokens=9)).setup["seq_len"] == 40
    with pytest.raises(UsageError, match="48 learned positions"):
        estimate(spec, InferenceSetup(max_new_tokens=49))


def test_chunks_of_a_prompt_count_together() -> None:
    spec = ModelSpec.from_config(GPT2)
    with pytest.raises(UsageError, match="56 tokens"):
        estimate(spec, InferenceSetup(seq_len=56, prefill_chunk_size=8))


def test_the_longest_context_ends_at_the_table() -> None:
    report = estimate(ModelSpec.from_config(GPT2), InferenceSetup(seq_len=16), find_gpu("24GB"))
    assert report.serving is not None
    assert report.serving.longest_context == 48


def test_rotary_positions_go_on() -> None:
    report = estimate(ModelSpec.from_config(LLAMA), TrainingSetup(seq_len=96))
    assert any("96 tokens exceed the 48 positions" in line for line in lines(report))
