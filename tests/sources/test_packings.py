"""Every way of packing a weight: which tensors are weights, which only their constants."""

from typing import Any

import pytest
from support.weights import Tensors, checkpoint

from memcalc.config.quantization import find_quantization
from memcalc.errors import ConfigError
from memcalc.sources.checkpoint.stored_tensor import Role

W4A16 = {
    "quant_method": "compressed-tensors",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": 128}}},
}

TABLE: list[tuple[str, Tensors, dict[str, Any], int]] = [
    (
        "bitsandbytes 8-bit",
        {"a.weight": ("I8", (8, 16)), "a.SCB": ("F32", (8,)), "a.weight_format": ("U8", ())},
        {"quant_method": "bitsandbytes", "load_in_8bit": True},
        128,
    ),
    (
        "FP8, one scale",
        {"a.weight": ("F8_E4M3", (8, 16)), "a.weight_scale": ("F32", ()), "a.input_scale": ("F32", ())},
        {"quant_algo": "FP8", "producer": {"name": "modelopt"}},
        128,
    ),
    (
        "FP8, a scale for each row",
        {"a.weight": ("F8_E4M3", (8, 16)), "a.weight_scale": ("BF16", (8, 1)), "self_attn.k_scale": ("F32", ())},
        {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "config_groups": {"g": {"weights": {"num_bits": 8, "type": "float"}}},
        },
        128,
    ),
    (
        "FBGEMM FP8",
        {"a.weight": ("F8_E4M3", (8, 16)), "a.weight_scale": ("F32", (8, 1))},
        {"quant_method": "fbgemm_fp8"},
        128,
    ),
    (
        "fused FP8 experts",
        {"experts.gate_up_proj": ("F8_E4M3", (2, 8, 16)), "experts.gate_up_proj_scale_inv": ("F32", (2, 1, 1))},
        {"quant_method": "fp8"},
        256,
    ),
    (
        "int8, compressed-tensors",
        {"a.weight": ("I8", (8, 16)), "a.weight_scale": ("BF16", (8, 1)), "a.weight_zero_point": ("I8", (8, 1))},
        {
            "quant_method": "compressed-tensors",
            "format": "int-quantized",
            "config_groups": {"g": {"weights": {"num_bits": 8}}},
        },
        128,
    ),
    (
        "NVFP4, ModelOpt",
        {
            "a.weight": ("U8", (8, 16)),
            "a.weight_scale": ("F8_E4M3", (8, 2)),
            "a.weight_scale_2": ("F32", ()),
            "a.input_scale": ("F32", ()),
        },
        {"quant_algo": "NVFP4", "producer": {"name": "modelopt"}},
        256,
    ),
    (
        "NVFP4, compressed-tensors",
        {
            "a.weight_packed": ("U8", (8, 16)),
            "a.weight_scale": ("F8_E4M3", (8, 2)),
            "a.weight_global_scale": ("F32", (1,)),
            "a.input_global_scale": ("F32", (1,)),
        },
        {
            "quant_method": "compressed-tensors",
            "format": "nvfp4-pack-quantized",
            "config_groups": {"g": {"weights": {"num_bits": 4}}},
        },
        256,
    ),
    (
        "DeepSeek-V4: FP4 experts beside FP8",
        {
            "m.experts.0.w1.weight": ("I8", (8, 64)),
            "m.experts.0.w1.scale": ("F8_E8M0", (8, 4)),
            "m.shared_experts.w1.weight": ("F8_E4M3", (128, 128)),
            "m.shared_experts.w1.scale": ("F8_E8M0", (1, 1)),
        },
        {"quant_method": "fp8", "scale_fmt": "ue8m0"},
        8 * 128 + 128 * 128,
    ),
    (
        "act order, padded columns",
        {
            "a.weight_packed": ("I32", (8, 13)),
            "a.weight_scale": ("BF16", (8, 1)),
            "a.weight_g_idx": ("I32", (100,)),
            "a.weight_shape": ("I64", (2,)),
        },
        W4A16,
        800,
    ),
    (
        "three bits, ten to a padded word",
        {"a.weight_packed": ("I32", (8, 13)), "a.weight_scale": ("BF16", (8, 1)), "a.weight_shape": ("I64", (2,))},
        {"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": {"num_bits": 3, "group_size": 128}}}},
        8 * 128,
    ),
    (
        "AQLM",
        {"a.codes": ("I16", (8, 16, 1)), "a.codebooks": ("F16", (1, 65536, 1, 8)), "a.scales": ("F16", (8, 1, 1, 1))},
        {"quant_method": "aqlm", "in_group_size": 8, "nbits_per_codebook": 16, "num_codebooks": 1},
        8 * 128,
    ),
    (
        "HQQ",
        {
            "a.W_q": ("U8", (32, 16)),
            "a.scale": ("F16", (16, 1)),
            "a.zero": ("F16", (16, 1)),
            "a.nbits": ("I32", (1,)),
            "a.shape": ("I32", (2,)),
            "a.bias": ("F16", (8,)),
        },
        {"quant_method": "hqq", "quant_config": {"weight_quant_params": {"nbits": 4, "group_size": 64}}},
        16 * 64 + 8,
    ),
    (
        "HQQ without groups",
        {"a.W_q": ("U8", (32, 16)), "a.zero": ("F16", (16, 1))},
        {"quant_method": "hqq", "bits": 2},
        32 * 16 * 4,
    ),
    ("EETQ", {"a.weight": ("I8", (8, 16)), "a.weight_scales": ("F16", (16,))}, {"quant_method": "eetq"}, 128),
    (
        "quanto int8",
        {"a.weight._data": ("I8", (8, 16)), "a.weight._scale": ("BF16", (8, 1)), "a.input_scale": ("BF16", ())},
        {"quant_method": "quanto", "weights": "int8"},
        128,
    ),
    (
        "quanto int4",
        {
            "a.weight._data._data": ("U8", (8, 16)),
            "a.weight._scale": ("BF16", (8, 1)),
            "a.weight._shift": ("I8", (8, 1)),
        },
        {"quant_method": "quanto", "weights": "int4"},
        256,
    ),
    (
        "torchao int8",
        {"a._weight_qdata": ("I8", (8, 16)), "a._weight_scale": ("BF16", (8, 1))},
        {"quant_method": "torchao", "quant_type": "int8_weight_only"},
        128,
    ),
    (
        "torchao int4",
        {
            "a._weight_qdata": ("I8", (8, 16)),
            "a._weight_scale": ("BF16", (8, 1)),
            "a._weight_zero_point": ("BF16", (8, 1)),
        },
        {"quant_method": "torchao", "quant_type": "int4_weight_only"},
        256,
    ),
    ("BitNet", {"a.weight": ("U8", (8, 16)), "a.weight_scale": ("BF16", (1,))}, {"quant_method": "bitnet"}, 512),
    (
        "sparse",
        {
            "a.weight.compressed": ("BF16", (64,)),
            "a.weight.bitmask": ("U8", (8, 2)),
            "a.weight.row_offsets": ("I64", (8,)),
            "a.weight.shape": ("I64", (2,)),
        },
        {"quant_method": "compressed-tensors"},
        128,
    ),
]


@pytest.mark.parametrize(("tensors", "stated", "parameters"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE])
def test_every_way_of_packing(tensors: Tensors, stated: dict[str, Any], parameters: int) -> None:
    norm: Tensors = {"norm.weight": ("BF16", (5,))}
    held = checkpoint({**tensors, **norm}, {"quantization_config": stated})
    assert held.parameters == parameters + 5
    assert held.notes == ()
    roles = {t.name: t.role for t in held.tensors}
    assert roles["norm.weight"] is Role.PARAMETER
    assert Role.BUFFER not in roles.values()


def test_torchao_says_its_subclass_in_the_metadata() -> None:
    metadata = {"a.weight": '{"_type": "Int4Tensor", "_data": {}}', "b.weight": '{"_type": "Float8Tensor"}'}
    found: Tensors = {"a._weight_qdata": ("I8", (8, 16)), "b._weight_qdata": ("F8_E4M3", (8, 16))}
    assert checkpoint(found, {"quantization_config": {"quant_method": "torchao"}}, metadata).parameters == 256 + 128


def test_the_exporters_own_file_counts_too() -> None:
    found = find_quantization(
        None, {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "group_size": 16}}
    )
    assert found is not None
    assert (found.method, found.bits, found.where) == ("modelopt", 4, "hf_quant_config.json")


def test_unknown_methods_are_said_to_be_unknown() -> None:
    held = checkpoint({"a.weight": ("BF16", (4, 4))}, {"quantization_config": {"quant_method": "zip9"}})
    assert held.parameters == 16
    assert "'zip9' is not known" in held.notes[0]
    held = checkpoint({"a.weight": ("BF16", (4, 4))}, {"quantization_config": {"quant_method": "fp8"}})
    assert "no tensor in the files is quantized" in held.notes[0]


@pytest.mark.parametrize(
    "stated", [None, [], {}, {"bits": None}, {"quant_method": None}, {"quant_method": ""}, {"config_groups": []}]
)
def test_statements_that_say_nothing(stated: Any) -> None:
    config = {"quantization_config": stated, "hidden_size": 3}
    assert checkpoint({"a.weight": ("BF16", (4, 4))}, config).parameters == 16


def test_a_statement_that_is_no_object() -> None:
    with pytest.raises(ConfigError, match="'quantization_config' as 5, but it must be an object"):
        checkpoint({"a.weight": ("BF16", (4, 4))}, {"quantization_config": 5})


def test_names_that_only_look_like_constants() -> None:
    """CLIP's logit_scale, a layer's own scale: parameters, in a quantized model too."""
    found: Tensors = {"logit_scale": ("F32", ()), "block.layer_scale": ("F32", (8,)), "norm.scale": ("F32", (8,))}
    assert checkpoint(found).parameters == 17
    packed: Tensors = {"a.qweight": ("I32", (128, 1)), "a.qzeros": ("I32", (1, 1)), "a.scales": ("F16", (1, 8))}
    stated = {"quantization_config": {"quant_method": "awq", "bits": 4}}
    assert checkpoint({**found, **packed}, stated).parameters == 17 + 1024


def test_an_nvfp4_repack_of_27b_is_not_15b() -> None:
    """Headers and the stated quantization come before any sum of packed tensors."""
    found = {
        f"l.{i}.{k}": v
        for i in range(27)
        for k, v in {
            "weight": ("U8", (10_000, 50_000)),
            "weight_scale": ("F8_E4M3", (10_000, 6_250)),
            "weight_scale_2": ("F32", ()),
        }.items()
    }
    held = checkpoint(found, {"quantization_config": {"quant_algo": "NVFP4"}})
    assert held.parameters == 27 * 10**9
    assert sum(t.nbytes for t in held.tensors) / 1e9 == pytest.approx(15.2, abs=0.1)
