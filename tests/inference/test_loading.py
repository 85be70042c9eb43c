"""What `from_pretrained(device_map="cuda")` has on the GPU at its peak, beyond the weights.

Measured with Transformers 5.24 and bitsandbytes 0.50 in PyTorch's allocator, on files in 16 bits.
"""

from typing import Any

import pytest

from memcalc import InferenceSetup, ModelSpec, estimate
from memcalc.errors import UsageError
from memcalc.inference.loading import loading_bytes
from memcalc.inference.served_model import served_model

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "intermediate_size": 2816,
    "vocab_size": 32000,
    "dtype": "bfloat16",
}
MIXTURE: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "hidden_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 1024,
    "moe_intermediate_size": 512,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "vocab_size": 8192,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}


@pytest.mark.parametrize(
    ("config", "quantization", "measured"),
    [
        (LLAMA, "nf4", 4_286_464),
        (LLAMA, "nf4-double", 4_760_576),
        (LLAMA, "int8", 8_897_536),
        ({**LLAMA, "tie_word_embeddings": True}, "nf4", 4_286_464),
        (MIXTURE, "none", 33_553_408),
        (MIXTURE, "nf4", 33_146_880),
        (MIXTURE, "int8", 32_857_088),
    ],
)
def test_what_is_there_for_a_moment(config: dict[str, Any], quantization: Any, measured: int) -> None:
    spec, setup = ModelSpec.from_config(config), InferenceSetup(quantization=quantization)
    assert loading_bytes(setup, served_model(spec, setup)) == pytest.approx(measured, rel=0.025)


def test_loading_is_a_phase_where_it_is_the_peak() -> None:
    """205,367,296 bytes were measured, of which 171,813,888 stay."""
    report = estimate(ModelSpec.from_config(MIXTURE), InferenceSetup(seq_len=64))
    assert report.peak.phase == "load"
    assert report.phases.load is not None
    assert report.phases.load.peak_bytes == pytest.approx(205_367_296, rel=1e-4)
    assert "loading" in report.peak.moment
    long = estimate(ModelSpec.from_config(MIXTURE), InferenceSetup(seq_len=16384, batch=4))
    assert long.phases.load is None
    moved = estimate(ModelSpec.from_config(MIXTURE), InferenceSetup(seq_len=64, load_on="cpu"))
    assert moved.phases.load is None
    assert moved.peak.allocated_bytes < report.peak.allocated_bytes


def test_an_engine_that_loads_in_its_own_way() -> None:
    with pytest.raises(UsageError, match="loads in its own way"):
        InferenceSetup(engine="vllm", load_on="gpu")
