"""Caches of Transformers beside the default, as PyTorch's tracker measured them: static, in chunks, in fp8.

Rows were made as those of `measured/` (torch 2.14.1, transformers 5.24.0): with the library's StaticCache, with a
prompt in two pieces of which the second is measured, and with its QuantizedCache in fp8. What is not to the byte is
small: scalars that a layer of a static cache keeps, and when in the first pass it allocates its share.
"""

from typing import Any

import pytest
from support.measured_rows import standing

from memcalc.common.sizes import rounded
from memcalc.inference.generate import generate
from memcalc.models.spec import ModelSpec
from memcalc.peak.sweep import Sweep
from memcalc.setup.setup import InferenceSetup

SHAPE = {"vocab_size": 5008, "hidden_size": 320, "intermediate_size": 864, "num_hidden_layers": 3}
LLAMA = {**SHAPE, "model_type": "llama", "num_attention_heads": 5, "num_key_value_heads": 1}
GEMMA = {
    **SHAPE,
    "model_type": "gemma3_text",
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "sliding_window": 64,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}


def static(prompt: int, room: int) -> dict[str, Any]:
    return {"engine": "transformers-static", "seq_len": prompt, "max_new_tokens": room - prompt + 1}


ROWS: list[tuple[dict[str, Any], dict[str, Any], int, int, int]] = [
    (LLAMA, static(160, 161), 247_320, 15_640_576, 13_144_576),
    (LLAMA, static(160, 200), 307_224, 15_698_944, 13_202_944),
    (LLAMA, {"seq_len": 160, "prefill_chunk_size": 32}, 245_760, 13_627_392, 13_170_688),
    (LLAMA, {"seq_len": 160, "prefill_chunk_size": 80}, 245_760, 14_391_296, 13_170_688),
    (LLAMA, static(40, 60), 92_184, 13_593_600, 12_986_368),
    (GEMMA, static(160, 161), 295_960, 12_559_872, 10_051_584),
    (GEMMA, static(160, 200), 335_896, 12_599_808, 10_091_520),
    (GEMMA, {"seq_len": 160, "prefill_chunk_size": 32}, 292_880, 10_634_752, 10_110_976),
    (GEMMA, {"seq_len": 160, "prefill_chunk_size": 80}, 292_880, 11_441_152, 10_209_280),
    (GEMMA, static(40, 60), 184_344, 10_501_632, 9_884_160),
    (LLAMA, {"seq_len": 160, "kv_dtype": "fp8"}, 122_880, 15_516_160, 13_258_240),
]


@pytest.mark.parametrize(("config", "options", "cache", "prefill", "decode"), ROWS)
def test_row(config: dict[str, Any], options: dict[str, Any], cache: int, prefill: int, decode: int) -> None:
    step = generate(ModelSpec.from_config(config), InferenceSetup(batch=2, dtype="bf16", **options))
    found, _ = Sweep(step.tape).peaks()
    prompt = rounded(8 * 2 * step.seq_len)  # the instrument cuts pieces out of the prompt, and counts it from then on
    pieces = {"prefill": prompt if "prefill_chunk" in options else 0, "decode": prompt}
    peaks = {phase: found[phase][0] + standing(step, phase) + extra for phase, extra in pieces.items()}
    assert step.cache_bytes == pytest.approx(cache, abs=3 * 8)
    assert peaks["prefill"] == pytest.approx(prefill, rel=0.003)
    assert peaks["decode"] == pytest.approx(decode, rel=0.001)
    if "prefill_chunk" in options:
        assert (peaks["prefill"], peaks["decode"]) == (prefill, decode)
