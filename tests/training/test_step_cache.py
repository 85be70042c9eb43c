"""Steps that were traced once: setups share one only where nothing that was said differs."""

from memcalc import ModelSpec, TrainingSetup, estimate
from memcalc.training.step import trace

GPTQ = {
    "model_type": "llama",
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 512,
    "vocab_size": 1000,
    "quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False},
}


def test_a_default_that_was_asked_for_is_a_setup_of_its_own() -> None:
    spec = ModelSpec.from_config(GPTQ)
    as_stored = estimate(spec, TrainingSetup(lora_rank=8))
    asked = estimate(spec, TrainingSetup(lora_rank=8, quantization="none"))
    assert any("trained by" in line for line in map(str, as_stored.assumptions))
    assert any("are dequantized when they are loaded" in line for line in map(str, asked.assumptions))
    assert asked.components.model_weights.peak_bytes > 2 * as_stored.components.model_weights.peak_bytes


def test_setups_that_differ_in_the_optimizer_alone_share_a_step() -> None:
    spec = ModelSpec.from_config({key: value for key, value in GPTQ.items() if key != "quantization_config"})
    steps = [trace(spec, TrainingSetup(optimizer=name)) for name in ("adamw", "sgd")]
    assert steps[0].tape is steps[1].tape
