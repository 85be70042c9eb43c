"""Which modules a quantized repository keeps wide: the lists of each library, with and without outer names."""

from typing import Any

import pytest

from memcalc.config.kv_cache_scheme import kv_cache_scheme
from memcalc.config.quantization import find_quantization, with_hf_quant
from memcalc.config.quantized_modules import quantized_modules
from memcalc.errors import ConfigError
from memcalc.tables.stated_formats import module_formats, stated_format

Q = "model.layers.3.self_attn.q_proj"
UP = "model.layers.3.mlp.up_proj"
GATE = "model.layers.3.mlp.gate"
EXPERTS = "model.layers.3.mlp.experts.gate_up_proj"
INNER = "model.language_model.layers.3.self_attn.q_proj"
TOWER = "model.visual.blocks.3.attn.qkv"


def wide(settings: dict[str, Any], *names: str) -> list[str]:
    stated = find_quantization({"quantization_config": settings})
    assert stated is not None
    quantization_of = quantized_modules(stated)
    return [name for name in names if quantization_of(name) is None]


MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
COMPRESSED = {"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": {"num_bits": 4}}}}
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
BNB = {"quant_method": "bitsandbytes", "load_in_4bit": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        (MODELOPT | {"ignore": ["model.layers.3.self_attn*"]}, [Q, INNER]),
        (MODELOPT | {"ignore": ["model.layers.3*"]}, [Q, UP, GATE, EXPERTS, INNER]),
        (MODELOPT | {"exclude_modules": ["*self_attn*", "lm_head"]}, [Q, INNER]),
        (MODELOPT | {"exclude_modules": ["model.layers.*.mlp.experts.*"]}, [EXPERTS]),
        (MODELOPT | {"ignore": ["language_model.model.layers.3.self_attn*"]}, [Q, INNER]),
        (MODELOPT | {"ignore": ["model.layers.30.self_attn*", "model.layers.1.*"]}, []),
        (MODELOPT | {"ignore": ["model.visual*"]}, [TOWER]),
        (MODELOPT | {"ignore": ["vision_tower*"]}, []),
        (COMPRESSED | {"ignore": ["re:.*self_attn.*"]}, [Q, INNER]),
        (COMPRESSED | {"ignore": ["re:visual.*"]}, [TOWER]),
        (COMPRESSED | {"ignore": ["re:model.layers.3.mlp.gate$"]}, [GATE]),
        (COMPRESSED | {"ignore": [UP, "lm_head"]}, [UP]),
        (COMPRESSED | {"ignore": ["re:.*mlp.experts.*up_proj$"]}, [EXPERTS]),
        (FP8 | {"modules_to_not_convert": ["visual"]}, [TOWER]),
        (FP8 | {"modules_to_not_convert": ["mlp.gate"]}, [GATE]),
        (FP8 | {"ignored_layers": ["model.language_model.layers.3.self_attn"]}, [Q, INNER]),
        (BNB | {"llm_int8_skip_modules": ["layers.3.self_attn"]}, [Q, INNER]),
        (BNB | {"llm_int8_skip_modules": ["layers.33.self_attn", "gate_pro"]}, []),
        (GPTQ, [TOWER]),
        (GPTQ | {"dynamic": {"-:.*attn.*": {}}}, [Q, INNER, TOWER]),
        (GPTQ | {"modules_in_block_to_quantize": [["self_attn.q_proj"]]}, [UP, GATE, EXPERTS, TOWER]),
        ({"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}, [Q, INNER]),
        ({"quant_method": "quark", "exclude": ["re:.*gate$", "model.layers.3.self_attn.*"]}, [Q, GATE, INNER]),
        ({"bits": 4, "group_size": 64, GATE: False}, [GATE]),
        ({"quant_method": "hqq", "skip_modules": ["self_attn"]}, [Q, INNER]),
    ],
    ids=str,
)
def test_what_stays_wide(settings: dict[str, Any], kept: list[str]) -> None:
    found = wide(settings, Q, UP, GATE, EXPERTS, INNER, TOWER)
    assert sorted(found) == sorted(kept)


def test_modules_with_bits_of_their_own() -> None:
    mixed = {
        "quant_method": "modelopt",
        "quant_algo": "MIXED_PRECISION",
        "quantized_layers": {
            Q: {"quant_algo": "FP8"},
            "model.layers.3.mlp*": {"quant_algo": "NVFP4", "group_size": 16},
        },
    }
    assert bits(mixed, Q, UP, "model.layers.4.mlp.up_proj") == [8.0, 4.5, None]
    groups = {
        "a": {"targets": ["re:.*self_attn.*"], "weights": {"num_bits": 8, "type": "float", "strategy": "tensor"}},
        "b": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "group_size": 128, "strategy": "group"}},
    }
    assert bits({"quant_method": "compressed-tensors", "config_groups": groups}, Q, UP) == [8.0, 4.125]
    dynamic = {"+:.*mlp.*": {"bits": 8, "group_size": 32}}
    assert bits(GPTQ | {"dynamic": dynamic}, UP) == [8 + 24 / 32 + 32 / 1024]
    layers = {"bits": 4, "group_size": 64, UP: {"bits": 8, "group_size": 64}}
    assert bits(layers, Q, UP) == [4.5, 8.5]


def bits(settings: dict[str, Any], *names: str) -> list[float | None]:
    """Bits of a weight in a matrix of 1024 by 1024, constants included."""
    stated = find_quantization({"quantization_config": settings})
    assert stated is not None
    form = stated_format(stated)
    assert form is not None
    format_of = module_formats(stated, form)
    found = [format_of(name) for name in names]
    return [None if own is None else own.nbytes((1024, 1024)) * 8 / 1024**2 for own in found]


@pytest.mark.parametrize(
    ("settings", "weight_bits"),
    [
        (MODELOPT, 4.5),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, 8.0),
        ({"quant_method": "modelopt", "quant_algo": "W4A16_AWQ"}, 4.125),
        ({"quant_method": "modelopt", "quant_algo": "MXFP8"}, 8.25),
        (COMPRESSED | {"config_groups": {"g": {"weights": {"num_bits": 4, "type": "float", "group_size": 16}}}}, 4.5),
        (COMPRESSED | {"config_groups": {"g": {"weights": {"num_bits": 4, "type": "float", "group_size": 32}}}}, 4.25),
        (FP8, 8 + 32 / 128**2),
        ({"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "fp4", "group_size": 32}}}, 4.25),
    ],
    ids=str,
)
def test_bits_of_a_weight(settings: dict[str, Any], weight_bits: float) -> None:
    assert bits(settings, Q) == [weight_bits]


def test_a_pattern_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="no regular expression"):
        wide(COMPRESSED | {"ignore": ["re:(self_attn"]}, Q)


@pytest.mark.parametrize(
    ("settings", "dtype"),
    [
        (MODELOPT | {"kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": False}}, "fp8"),
        (MODELOPT | {"kv_cache_scheme": "FP8"}, "fp8"),
        (MODELOPT | {"kv_cache_quant_algo": "FP8"}, "fp8"),
        (MODELOPT | {"kv_cache_quant_algo": None}, None),
        (MODELOPT | {"kv_cache_quant_algo": "NVFP4"}, "nvfp4"),
        (COMPRESSED | {"kv_cache_scheme": {"num_bits": 8, "type": "int"}}, "int8"),
        (COMPRESSED | {"kv_cache_scheme": None}, None),
        ({"quant_method": "quark", "export": {"kv_cache_group": ["*k_proj", "*v_proj"]}}, "fp8"),
    ],
    ids=str,
)
def test_the_cache_that_a_repository_asks_for(settings: dict[str, Any], dtype: str | None) -> None:
    found = kv_cache_scheme(find_quantization({"quantization_config": settings}))
    assert (found.dtype if found else None) == dtype


def test_the_file_of_modelopt_beside_a_config() -> None:
    written = {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}}
    found = find_quantization(with_hf_quant({"model_type": "llama"}, written))
    assert found is not None
    assert (found.method, found.bits) == ("modelopt", 8)
    both = with_hf_quant({"quantization_config": MODELOPT}, written)
    assert both["quantization_config"] == MODELOPT | {"kv_cache_quant_algo": "FP8"}
    assert with_hf_quant({"model_type": "llama"}, None) == {"model_type": "llama"}
