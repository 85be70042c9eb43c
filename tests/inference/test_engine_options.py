"""Options of engines that a model has no use for are refused or told."""

import pytest

from memcalc.errors import UsageError
from memcalc.inference.generate import generate
from memcalc.models.spec import ModelSpec
from memcalc.setup.setup import InferenceSetup

DENSE = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 256,
    "max_position_embeddings": 512,
}
MAMBA = {"model_type": "mamba", "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 256, "state_size": 8}


@pytest.mark.parametrize(
    ("config", "options", "line"),
    [
        (DENSE, {"engine": "llama.cpp", "n_cpu_moe": 1}, "--n-cpu-moe changes nothing: this model has no experts"),
        (DENSE, {"engine": "llama.cpp", "swa_full": True}, "--swa-full changes nothing"),
        (MAMBA, {"engine": "llama.cpp", "cache_type_k": "q8_0"}, "--cache-type-k changes nothing"),
        (MAMBA, {"engine": "llama.cpp", "flash_attn": "on"}, "--flash-attn changes nothing"),
        (MAMBA, {"engine": "vllm", "kv_dtype": "fp8"}, "--kv-dtype changes nothing"),
    ],
)
def test_idle_options_are_told(config: dict[str, object], options: dict[str, object], line: str) -> None:
    step = generate(ModelSpec.from_config(config), InferenceSetup.model_validate({"seq_len": 64, **options}))
    assert any(note.text.startswith(line) for note in step.notes)
    without = {"seq_len": 64, "engine": options["engine"]}
    plain = generate(ModelSpec.from_config(config), InferenceSetup.model_validate(without))
    assert not any("changes nothing" in note.text for note in plain.notes)


@pytest.mark.parametrize("engine", ["vllm", "sglang", "tgi", "llama.cpp", "transformers"])
def test_limits_of_pixels_on_a_text_model(engine: str) -> None:
    setup = InferenceSetup.model_validate({"engine": engine, "seq_len": 64, "image_min_pixels": 1000})
    with pytest.raises(UsageError, match="limits of pixels"):
        generate(ModelSpec.from_config(DENSE), setup)


def test_positions_of_a_text_config() -> None:
    def positions(text: dict[str, object]) -> int | None:
        return ModelSpec.from_config({"model_type": "gemma3", "text_config": text}).positions

    assert positions({"model_type": "gemma3_text"}) == 131072
    assert positions({"model_type": "gemma3_text", "max_position_embeddings": 8192}) == 8192
    assert positions({}) is None
