"""A real GPU: totals of `torch.cuda.max_memory_allocated()` on an RTX A6000, from another estimator's public benchmark.

Its runs used torch 2.14.1 and transformers 4.57.6. They keep gradients between steps (here: accumulation), build a mask
for SDPA even without padding (a padding mask), keep the outputs through backward, and ask for the logits of the whole
prompt.
"""

from typing import Any

import pytest

from memcalc import InferenceSetup, ModelSpec, TrainingSetup, estimate, find_gpu

LLAMA_1B = {
    "model_type": "llama",
    "hidden_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "intermediate_size": 8192,
    "vocab_size": 128256,
    "tie_word_embeddings": True,
    "max_position_embeddings": 131072,
}
LLAMA_3B = LLAMA_1B | {"hidden_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 24, "head_dim": 128}
LLAMA_8B = LLAMA_1B | {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "head_dim": 128,
    "intermediate_size": 14336,
    "tie_word_embeddings": False,
}
QWEN_1_5B = {
    "model_type": "qwen2",
    "hidden_size": 1536,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "intermediate_size": 8960,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
    "max_position_embeddings": 131072,
}
LORA = {"lora_rank": 16, "lora_targets": "q_proj,k_proj,v_proj,o_proj"}

TRAINING: list[tuple[dict[str, Any], dict[str, Any], int]] = [
    (LLAMA_1B, {"precision": "bf16"}, 17_514_948_096),
    (LLAMA_1B, {"precision": "mixed-bf16"}, 30_551_909_888),
    (LLAMA_1B, {"precision": "bf16", "attention": "eager"}, 30_262_339_072),
    (QWEN_1_5B, {"precision": "bf16"}, 23_397_631_488),
    (LLAMA_1B, {"precision": "mixed-bf16", **LORA}, 14_524_982_784),
    (LLAMA_3B, {"precision": "bf16", **LORA}, 18_980_605_440),
    (QWEN_1_5B, {"precision": "bf16", **LORA}, 13_778_428_416),
]
INFERENCE: list[tuple[dict[str, Any], str, int]] = [
    (LLAMA_1B, "sdpa", 3_083_096_576),
    (LLAMA_1B, "eager", 3_949_761_024),
    (LLAMA_8B, "sdpa", 16_880_656_896),
]


@pytest.mark.parametrize(("config", "options", "measured"), TRAINING)
def test_training_total(config: dict[str, Any], options: dict[str, Any], measured: int) -> None:
    setup = TrainingSetup(batch=1, seq_len=2048, padding_mask=True, grad_accum=2, keep_logits=True, **options)
    report = estimate(ModelSpec.from_config(config), setup, find_gpu("RTX A6000"))
    assert report.peak.allocated_bytes == pytest.approx(measured, rel=0.01)


@pytest.mark.parametrize(("config", "attention", "measured"), INFERENCE)
def test_inference_total(config: dict[str, Any], attention: Any, measured: int) -> None:
    setup = InferenceSetup(batch=1, seq_len=2048, padding_mask=True, attention=attention, prefill_logits="all")
    report = estimate(ModelSpec.from_config(config), setup, find_gpu("RTX A6000"))
    assert report.peak.allocated_bytes == pytest.approx(measured, rel=0.002)


def test_context_outside_the_allocator() -> None:
    """What the process took beside the allocator in the training runs."""
    report = estimate(ModelSpec.from_config(LLAMA_1B), TrainingSetup(), find_gpu("RTX A6000"))
    context = {part.name: part.bytes for part in report.components.other_overhead.parts}["CUDA context"]
    assert context == 744_685_568
