"""Which modules get an adapter: layers, patterns, exceptions, ranks, parameters. Counts are PEFT 0.21's."""

from pathlib import Path
from typing import Any

import pytest
from support.cli_runs import answer, assumes, refused
from support.shapes import decoder
from support.weights import write_json

LLAMA = decoder(64, 6, 4, 2, 192, 500)
MOE = decoder(64, 4, 4, 2, 192, 500, model_type="qwen3_moe", head_dim=16, moe_intermediate_size=48, num_experts=4)
MOE |= {"num_experts_per_tok": 2}


def trained(folder: Path, config: dict[str, Any], *options: str) -> int:
    path = write_json(folder / "config.json", config)
    found: int = answer("from-file", str(path), *options)["model"]["parameters"]["trainable"]
    return found


@pytest.mark.parametrize(
    ("config", "rank", "options", "count"),
    [
        (LLAMA, 8, ["--lora-targets", "q_proj,v_proj", "--lora-layers-to-transform", "0,1,4"], 5_376),
        (LLAMA, 8, ["--lora-layers-to-transform", "2-3"], 3_584),
        (LLAMA, 8, ["--lora-targets", r".*\.(q|k)_proj"], 10_752),
        (LLAMA, 8, ["--lora-targets", r"model\.layers\.[0-2]\.mlp\..*_proj"], 18_432),
        (LLAMA, 8, ["--lora-targets", "all-linear", "--lora-exclude-modules", "down_proj"], 46_080),
        (
            LLAMA,
            8,
            ["--lora-targets", "q_proj,o_proj", "--lora-rank-pattern", "o_proj=16,layers.0.self_attn.q_proj=4"],
            17_920,
        ),
        (LLAMA, 4, ["--lora-targets", "all-linear", "--lora-rank-pattern", ".*mlp.*=2"], 19_968),
        (LLAMA, 8, ["--lora-targets", "layers.5.self_attn.q_proj"], 1_024),
        (MOE, 8, ["--lora-target-parameters", "mlp.experts.gate_up_proj,mlp.experts.down_proj"], 34_816),
        (MOE, 8, ["--lora-targets", "q_proj", "--lora-target-parameters", "mlp.experts.down_proj"], 18_432),
        (LLAMA, 8, ["--peft-type", "rslora"], 10_752),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_is_trained(tmp_path: Path, config: dict[str, Any], rank: int, options: list[str], count: int) -> None:
    assert trained(tmp_path, config, "--lora-rank", str(rank), *options) == count


BAICHUAN = decoder(64, 3, 4, 4, 192, 500, model_type="baichuan")
INTERNLM2 = decoder(64, 3, 4, 2, 192, 500, model_type="internlm2", bias=False)
QWEN = decoder(64, 3, 4, 4, 384, 500, model_type="qwen", kv_channels=16)
CHATGLM = {
    "model_type": "chatglm",
    "num_layers": 3,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "kv_channels": 16,
    "multi_query_attention": True,
    "multi_query_group_num": 2,
    "ffn_hidden_size": 192,
    "padded_vocab_size": 500,
}


@pytest.mark.parametrize(
    ("config", "targets", "count"),
    [
        (BAICHUAN, "W_pack", 3 * 8 * (64 + 192)),
        (BAICHUAN, "W_pack,o_proj", 3 * 8 * (64 + 192 + 128)),
        (INTERNLM2, "wqkv,wo", 3 * 8 * (64 + 128 + 128)),
        (INTERNLM2, "w1,w2,w3", 3 * 8 * 3 * 256),
        (QWEN, "c_attn", 3 * 8 * (64 + 192)),
        (QWEN, "c_attn,c_proj,w1,w2", 3 * 8 * (64 + 192 + 128 + 3 * 256)),
        (CHATGLM, "query_key_value", 3 * 8 * (64 + 128)),
        (CHATGLM, "query_key_value,dense,dense_h_to_4h,dense_4h_to_h", 3 * 8 * (64 + 128 + 128 + 64 + 384 + 256)),
    ],
)
def test_names_of_the_repositorys_own_code(tmp_path: Path, config: dict[str, Any], targets: str, count: int) -> None:
    assert trained(tmp_path, config, "--lora-rank", "8", "--lora-targets", targets) == count


def test_projections_that_own_code_keeps_as_one_are_that_one(tmp_path: Path) -> None:
    path = str(write_json(tmp_path / "config.json", BAICHUAN))
    parts = answer("from-file", path, "--lora-rank", "8", "--lora-targets", "q_proj,k_proj,v_proj")
    assert parts["model"]["parameters"]["trainable"] == trained(
        tmp_path, BAICHUAN, "--lora-rank", "8", "--lora-targets", "W_pack"
    )
    assert assumes(parts, "k_proj, q_proj, v_proj", "one projection, W_pack")
    gates = ("--lora-rank", "8", "--lora-targets", "gate_proj,up_proj")
    assert trained(tmp_path, CHATGLM, *gates) == 3 * 8 * (64 + 384)
    assert trained(tmp_path, BAICHUAN, *gates) == 3 * 8 * 2 * 256


def test_attention_of_a_repositorys_own_code_is_assumed(tmp_path: Path) -> None:
    path = str(write_json(tmp_path / "config.json", BAICHUAN))
    eager = answer("from-file", path, "--attention", "eager", "--unit", "GiB")
    assert assumes(answer("from-file", path), "attention is assumed", "baichuan", "with eager attention")
    assert not assumes(eager, "attention is assumed")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--lora-targets", "all-linear", "--lora-layers-to-transform", "0"], ("all-linear", "q_proj,v_proj")),
        (["--lora-targets", ".*q_proj", "--lora-layers-to-transform", "0"], ("regular expression",)),
        (["--lora-exclude-modules", ".*"], ("--lora-exclude-modules .*",)),
        (["--lora-rank-pattern", "q_proj=90000"], ("--lora-rank-pattern 90000",)),
        (["--lora-targets", "(q_proj"], ("--lora-targets", "no regular expression")),
        (["--lora-layers-to-transform", "first"], ("positions", "0-7")),
        (["--lora-layers-to-transform", "99"], ("names no layer", "0 to 5")),
        (["--lora-rank-pattern", "q_proj"], ("q_proj=32",)),
        (["--lora-rank-pattern", "q_proj=0"], ("q_proj=32",)),
        (["--lora-target-parameters", "mlp.experts.bias"], ("mlp.experts.bias", "gate_up_proj")),
        (["--peft-type", "adalora"], ("'adalora'", "not computed", "ranks change")),
        (["--peft-type", "ia3"], ("'ia3'", "not computed")),
        (["--peft-type", "prefix_tuning"], ("'prefix_tuning'", "not computed")),
        (["--peft-type", "wonder"], ("'wonder'", "not computed")),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_is_refused(tmp_path: Path, options: list[str], words: tuple[str, ...]) -> None:
    path = str(write_json(tmp_path / "config.json", LLAMA))
    message = refused(2, "from-file", path, "--lora-rank", "8", *options)
    assert all(word in message for word in words), message


@pytest.mark.parametrize("option", ["--lora-rank-pattern", "--lora-exclude-modules", "--lora-layers-to-transform"])
def test_options_of_lora_need_it(tmp_path: Path, option: str) -> None:
    path = str(write_json(tmp_path / "config.json", LLAMA))
    assert "--lora-rank 16" in refused(2, "from-file", path, option, "1")
