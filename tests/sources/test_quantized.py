"""Quantized checkpoints: logical parameters, stored bytes, bytes when loaded."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.weights import checkpoint

from memcalc.sources.checkpoint.stored_tensor import Role

Entry = dict[str, tuple[str, tuple[int, ...]]]
Pack = Callable[[int, int], Entry]


def linears(hidden: int, kv: int, inner: int) -> Iterator[tuple[str, int, int]]:
    """(name, in, out) of a Llama block's matrices."""
    yield "self_attn.q_proj", hidden, hidden
    yield "self_attn.k_proj", hidden, kv
    yield "self_attn.v_proj", hidden, kv
    yield "self_attn.o_proj", hidden, hidden
    yield "mlp.gate_proj", hidden, inner
    yield "mlp.up_proj", hidden, inner
    yield "mlp.down_proj", inner, hidden


def llama(
    pack: Pack, *, hidden: int, kv: int, inner: int, depth: int, vocab: int, qkv_bias: bool = False, dtype: str = "F16"
) -> Entry:
    """A whole Llama-shaped model whose block matrices are stored as `pack` says; embedding, head and norms are wide."""
    found: Entry = {"model.embed_tokens.weight": (dtype, (vocab, hidden)), "lm_head.weight": (dtype, (vocab, hidden))}
    found["model.norm.weight"] = (dtype, (hidden,))
    for layer in range(depth):
        start = f"model.layers.{layer}"
        found[f"{start}.input_layernorm.weight"] = found[f"{start}.post_attention_layernorm.weight"] = (
            dtype,
            (hidden,),
        )
        for name, columns, rows in linears(hidden, kv, inner):
            found.update({f"{start}.{name}.{leaf}": entry for leaf, entry in pack(columns, rows).items()})
            if qkv_bias and name[-6:] in ("q_proj", "k_proj", "v_proj"):
                found[f"{start}.{name}.bias"] = (dtype, (rows,))
    return found


def gptq(bits: int, group: int, order: bool = True) -> Pack:
    def pack(columns: int, rows: int) -> Entry:
        groups = columns // group if group > 0 else 1
        found: Entry = {
            "qweight": ("I32", (columns * bits // 32, rows)),
            "qzeros": ("I32", (groups, rows * bits // 32)),
            "scales": ("F16", (groups, rows)),
        }
        return {**found, "g_idx": ("I32", (columns,))} if order else found

    return pack


def awq(columns: int, rows: int) -> Entry:
    return {
        "qweight": ("I32", (columns, rows // 8)),
        "qzeros": ("I32", (columns // 128, rows // 8)),
        "scales": ("F16", (columns // 128, rows)),
    }


def nf4(columns: int, rows: int) -> Entry:
    """bitsandbytes NF4 with double quantization, as Transformers saves it."""
    blocks = columns * rows // 64
    return {
        "weight": ("U8", (columns * rows // 2, 1)),
        "weight.absmax": ("U8", (blocks,)),
        "weight.quant_map": ("F32", (16,)),
        "weight.nested_absmax": ("F32", (-(-blocks // 256),)),
        "weight.nested_quant_map": ("F32", (256,)),
        "weight.quant_state.bitsandbytes__nf4": ("U8", (119,)),
    }


def fp8_blocks(columns: int, rows: int) -> Entry:
    return {"weight": ("F8_E4M3", (rows, columns)), "weight_scale_inv": ("F32", (-(-rows // 128), -(-columns // 128)))}


def w4a16(columns: int, rows: int) -> Entry:
    return {
        "weight_packed": ("I32", (rows, columns // 8)),
        "weight_scale": ("BF16", (rows, columns // 128)),
        "weight_shape": ("I64", (2,)),
    }


W4A16 = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {
        "group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": 128, "strategy": "group"}}
    },
    "ignore": ["lm_head"],
}


def test_awq_of_a_7b() -> None:
    """Qwen2.5-7B-Instruct-AWQ: 7,615,616,512 parameters, as its unquantized twin has; packed, it looks like 2B."""
    shape: dict[str, Any] = {"hidden": 3584, "kv": 512, "inner": 18944, "depth": 28, "vocab": 152064, "qkv_bias": True}
    config = {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"}}
    held = checkpoint(llama(awq, **shape), config)
    assert held.parameters == 7_615_616_512
    assert held.notes == ()
    assert str(held.quantization) == "awq 4-bit"
    linear = 28 * (2 * 3584 * 3584 + 2 * 3584 * 512 + 3 * 3584 * 18944)
    assert held.quantized_parameters == linear
    constants = linear // 128 * 2 + linear // 128 // 2
    assert held.stored_bytes == linear // 2 + constants + 2 * (held.parameters - linear)
    assert held.loaded_bytes("bfloat16") == held.stored_bytes
    assert held.loaded_bytes("float32") == held.stored_bytes + 2 * (held.parameters - linear)


@pytest.mark.parametrize("order", [True, False])
def test_gptq_of_a_13b(order: bool) -> None:
    """Llama-2-13B in GPTQ: 13,015,864,320 parameters, with and without the group index."""
    shape: dict[str, Any] = {"hidden": 5120, "kv": 5120, "inner": 13824, "depth": 40, "vocab": 32000}
    config = {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 128}}
    held = checkpoint(llama(gptq(4, 128, order), **shape), config)
    assert held.parameters == 13_015_864_320
    assert held.shapes["model.layers.3.mlp.down_proj.weight"] == (5120, 13824)


def test_three_bits_are_not_ten_to_a_word() -> None:
    """A 70B GPTQ of 3 bits without groups: 32/3 weights in a word, 68,976,648,192 in all."""
    shape: dict[str, Any] = {"hidden": 8192, "kv": 1024, "inner": 28672, "depth": 80, "vocab": 32000}
    config = {"quantization_config": {"quant_method": "gptq", "bits": 3, "group_size": -1}}
    for order in (True, False):
        assert checkpoint(llama(gptq(3, -1, order), **shape), config).parameters == 68_976_648_192


def test_bits_of_a_layer_come_from_its_shapes() -> None:
    """Mixed recipes keep some layers at 8 bits under a config that says 4."""
    config = {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 128}}
    assert checkpoint({f"a.{k}": v for k, v in gptq(8, 128, False)(1024, 512).items()}, config).parameters == 1024 * 512


def test_w4a16_of_a_70b() -> None:
    """Llama-3.1-70B, compressed-tensors pack-quantized: 70,553,706,496."""
    shape: dict[str, Any] = {"hidden": 8192, "kv": 1024, "inner": 28672, "depth": 80, "vocab": 128256}
    held = checkpoint(llama(w4a16, **shape), {"quantization_config": W4A16})
    assert held.parameters == 70_553_706_496
    assert held.packings == ("compressed-tensors words",)


@pytest.mark.parametrize("place", [(), ("text_config",), ("thinker_config", "text_config")])
def test_the_statement_may_lie_deeper(place: tuple[str, ...]) -> None:
    """Kimi-K2.5 states it inside text_config: whoever looks only at the top counts a sixth of the parameters."""
    config: dict[str, Any] = {"quantization_config": W4A16}
    for key in reversed(place):
        config = {key: config}
    held = checkpoint({f"a.{k}": v for k, v in w4a16(1024, 512).items()}, config)
    assert held.parameters == 1024 * 512
    assert held.quantization is not None
    assert held.quantization.where == ".".join((*place, "quantization_config"))


def test_quantized_8b_for_qlora() -> None:
    """Llama-3.1-8B in NF4: the linears 3.25 GiB, constants 0.1, embedding and head 1.96 in 16 bits: 5.3 GiB in all."""
    shape: dict[str, Any] = {"hidden": 4096, "kv": 1024, "inner": 14336, "depth": 32, "vocab": 128256, "dtype": "BF16"}
    config = {"quantization_config": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}}
    held = checkpoint(llama(nf4, **shape), config)
    assert held.parameters == 8_030_261_248
    assert held.quantized_parameters == 6_979_321_856
    assert held.stored_bytes / 2**30 == pytest.approx(5.3, abs=0.03)
    assert str(held.quantization) == "bitsandbytes 4-bit"


def test_four_bits_are_not_half_a_byte_for_all() -> None:
    """open_llama_3b: 3.43B parameters, 3.22B packed; 2.02 GB with a 16-bit embedding and head, 2.43 GB with 32 bits."""
    shape: dict[str, Any] = {"hidden": 3200, "kv": 3200, "inner": 8640, "depth": 26, "vocab": 32000}
    held = checkpoint(llama(nf4, **shape), {"quantization_config": {"load_in_4bit": True}})
    constants = sum(t.nbytes for t in held.tensors if t.role is Role.CONSTANT)
    assert held.parameters == 3_426_473_600
    assert (held.loaded_bytes("float16") - constants) / 1e9 == pytest.approx(2.02, abs=0.01)
    assert (held.loaded_bytes("float32") - constants) / 1e9 == pytest.approx(2.43, abs=0.01)


def test_quant_storage_may_be_another_dtype() -> None:
    """For FSDP the packed bytes are stored as BF16 words: four weights in each."""
    held = checkpoint(
        {"a.weight": ("BF16", (1024, 1)), "a.weight.absmax": ("F32", (64,)), "a.weight.quant_map": ("F32", (16,))}
    )
    assert held.parameters == 4096
    assert "no config states" in held.notes[0]


def test_fp8_with_block_scales() -> None:
    """Qwen3-8B-FP8 in shape: every weight one byte, an F32 scale for each 128 x 128 block."""
    shape: dict[str, Any] = {"hidden": 4096, "kv": 1024, "inner": 12288, "depth": 2, "vocab": 151936, "dtype": "BF16"}
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    held = checkpoint(llama(fp8_blocks, **shape), config)
    linear = 2 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 12288)
    assert held.quantized_parameters == linear
    assert held.stored_bytes == linear + linear // 128**2 * 4 + 2 * (held.parameters - linear)
    assert held.stored_dtype == "BF16"


def test_mxfp4_of_gpt_oss_20b() -> None:
    """gpt-oss-20b: 20,914,757,184 parameters in 13.8 GB; two weights a byte, a scale byte for 32 of them."""
    found: Entry = {"model.embed_tokens.weight": ("BF16", (201088, 2880)), "lm_head.weight": ("BF16", (201088, 2880))}
    found["model.norm.weight"] = ("BF16", (2880,))
    for i in range(24):
        at, experts = f"model.layers.{i}", f"model.layers.{i}.mlp.experts"
        for name, rows, columns in (
            ("q_proj", 4096, 2880),
            ("k_proj", 512, 2880),
            ("v_proj", 512, 2880),
            ("o_proj", 2880, 4096),
        ):
            found[f"{at}.self_attn.{name}.weight"] = ("BF16", (rows, columns))
            found[f"{at}.self_attn.{name}.bias"] = ("BF16", (rows,))
        found[f"{at}.self_attn.sinks"] = ("BF16", (64,))
        found[f"{at}.mlp.router.weight"] = ("BF16", (32, 2880))
        found[f"{at}.mlp.router.bias"] = ("BF16", (32,))
        found[f"{at}.input_layernorm.weight"] = found[f"{at}.post_attention_layernorm.weight"] = ("BF16", (2880,))
        for name, rows in (("gate_up_proj", 5760), ("down_proj", 2880)):
            found[f"{experts}.{name}_blocks"] = ("U8", (32, rows, 90, 16))
            found[f"{experts}.{name}_scales"] = ("U8", (32, rows, 90))
            found[f"{experts}.{name}_bias"] = ("BF16", (32, rows))
    held = checkpoint(found, {"quantization_config": {"quant_method": "mxfp4"}})
    assert held.parameters == 20_914_757_184
    assert held.stored_bytes == 13_761_264_768
    assert held.shapes["model.layers.0.mlp.experts.gate_up_proj"] == (32, 5760, 2880)


def test_mlx_words_of_314_billion() -> None:
    """An 8-bit MLX model: 78,613,118,976 words of four weights, and constants that look like parameters."""
    rows = 78_613_118_976 // 16
    found: Entry = {
        "a.weight": ("U32", (rows, 16)),
        "a.scales": ("BF16", (rows, 1)),
        "a.biases": ("BF16", (rows, 1)),
        "norm.weight": ("BF16", (138_147_970,)),
    }
    held = checkpoint(found, {"quantization": {"bits": 8, "group_size": 64}})
    assert held.parameters == 314_590_623_874
    assert sum(n for d, n in held.stored_bytes_by_dtype.items() if d == "BF16") == 2 * 9_964_787_842


def test_mlx_layers_with_their_own_bits() -> None:
    found: Entry = {"a.weight": ("U32", (8, 16)), "a.scales": ("BF16", (8, 2)), "a.biases": ("BF16", (8, 2))}
    stated = {"bits": 8, "group_size": 64}
    assert checkpoint(found, {"quantization": {**stated, "a": {"bits": 4, "group_size": 64}}}).parameters == 8 * 128
