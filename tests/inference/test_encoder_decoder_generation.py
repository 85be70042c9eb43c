"""What generation with an encoder-decoder keeps, against what can be counted by hand."""

import pytest
from support.reports import lines

from memcalc.estimation.estimate import estimate
from memcalc.inference.generate import generate
from memcalc.models.spec import ModelSpec
from memcalc.peak.sweep import Sweep
from memcalc.setup.setup import InferenceSetup, TrainingSetup
from memcalc.training.step import trace
from memcalc.training.traced_step import Step

BART = {
    "model_type": "bart",
    "vocab_size": 500,
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
}
WHISPER = {
    "model_type": "whisper",
    "vocab_size": 500,
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "num_mel_bins": 8,
    "max_source_positions": 100,
}
T5 = {"model_type": "t5", "vocab_size": 500, "d_model": 64, "d_ff": 128, "d_kv": 16, "num_heads": 4, "num_layers": 3}


def run(config: dict[str, object], **options: int) -> Step:
    return generate(ModelSpec.from_config(config), InferenceSetup(dtype="bf16", **options))  # type: ignore[arg-type]


def prefill(step: Step) -> int:
    return Sweep(step.tape).peaks()[0]["prefill"][0]


@pytest.mark.parametrize(("config", "source"), [(BART, 90), (T5, 90), (WHISPER, 100)])
def test_the_cache_holds_the_source_once_and_every_token_written(config: dict[str, object], source: int) -> None:
    step = run(config, batch=2, seq_len=90, max_new_tokens=20)
    per_token = 2 * 3 * 2 * 64 * 2  # key and value, decoder layers, sequences, width, bytes
    assert step.cache_bytes == per_token * (source + 20)


@pytest.mark.parametrize("config", [BART, T5, WHISPER])
def test_the_encoder_reads_once_for_all_beams(config: dict[str, object]) -> None:
    alone, beams, more = (run(config, batch=b, seq_len=90, num_beams=n) for b, n in ((2, 1), (2, 3), (6, 1)))
    assert beams.cache_bytes == more.cache_bytes == 3 * alone.cache_bytes
    assert prefill(alone) < prefill(beams) <= prefill(more)


def test_the_ones_of_a_decoder_count_as_a_mask_and_are_told() -> None:
    report = estimate(ModelSpec.from_config(BART), TrainingSetup(batch=2, seq_len=90))
    assert any("mask of ones" in line for line in lines(report))
    step = trace(ModelSpec.from_config(BART), TrainingSetup(batch=2, seq_len=90))
    assert any(made.name == "attention mask" for made in step.tape.allocations)
