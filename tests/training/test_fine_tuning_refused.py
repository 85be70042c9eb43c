"""Options of fine-tuning that cannot be answered: one sentence that says what, why and what next, and exit code 2."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.cli_runs import refused, run
from support.reports import lines

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 512,
    "vocab_size": 4000,
}
GPTQ = {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 128}}
NF4 = {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}}
LINEAR = "q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj, lm_head"

REFUSED: list[tuple[dict[str, Any], str, tuple[str, ...]]] = [
    ({}, "--lora-rank 0", ("--lora-rank", "at least 1")),
    ({}, "--lora-rank -8", ("--lora-rank", "at least 1")),
    ({}, "--lora-rank 2.5", ("--lora-rank", "whole number")),
    ({}, "--lora-rank 300", ("300", "none has a rank above 256")),
    ({}, "--lora-rank 130 --lora-targets k_proj,v_proj", ("130", "none has a rank above 128")),
    ({}, "--lora-rank 8 --lora-targets c_attn", ("c_attn matches no module", LINEAR)),
    ({}, "--lora-rank 8 --lora-targets input_layernorm", ("no linear layer or embedding", LINEAR)),
    ({"model_type": "phi3"}, "--lora-rank 8", ("no default LoRA targets for phi3", "all-linear", "qkv_proj")),
    ({}, "--lora-rank 8 --modules-to-save wte", ("--modules-to-save wte", "embed_tokens")),
    ({}, "--lora-rank 8 --modules-to-save 0", ("--modules-to-save 0", "as a whole")),
    ({}, "--lora-rank 8 --train-only head", ("--train-only", "--modules-to-save")),
    ({}, "--lora-targets q_proj", ("--lora-targets", "--lora-rank")),
    ({}, "--quantization nf4", ("no gradients", "--lora-rank")),
    ({}, "--quantization mxfp4 --lora-rank 8", ("MXFP4", "cannot be trained on", "nf4")),
    (GPTQ, "--quantization nf4 --lora-rank 8", ("quantized already (gptq 4-bit)", "quantization_config")),
    (NF4, "--quantization int8 --lora-rank 8", ("quantized already", "quantization_config")),
    ({}, "--quantization gptq-4 --lora-rank 8 --dora", ("no DoRA on gptq-4 weights", "nf4")),
    ({}, "--quantization awq-4 --lora-rank 8 --dora", ("no DoRA on awq-4 weights", "nf4")),
    ({}, "--quantization fp8 --lora-rank 8 --dora", ("no DoRA on fp8 weights", "nf4")),
    (GPTQ, "--lora-rank 8 --dora", ("no DoRA", "gptq 4-bit", "leave out --dora")),
    ({}, "--train-only last-4", ("last-4", "has 3")),
    ({}, "--train-only nothing", ("--train-only nothing", "last-N", "q_proj")),
    ({}, "--freeze vision", ("--freeze vision", "no weight")),
    ({}, "--checkpoint-every-n-blocks 2", ("--checkpoint-every-n-blocks", "--activation-checkpointing full")),
    ({}, "--logits-to-keep 300", ("--logits-to-keep 300", "256")),
    ({}, "--label-smoothing 1", ("--label-smoothing", "less than 1")),
    ({}, "--z-loss --label-smoothing 0.1", ("--z-loss", "liger")),
    ({}, "--loss-implementation cut-cross-entropy --precision fp32", ("16 bits", "liger")),
    ({"model_type": "bert"}, "--logits-to-keep 8", ("--logits-to-keep", "language-model head")),
]


def write(tmp_path: Path, config: dict[str, Any]) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA | config))
    return str(path)


@pytest.mark.parametrize(("config", "options", "words"), REFUSED, ids=lambda value: str(value)[:60])
def test_refused(tmp_path: Path, config: dict[str, Any], options: str, words: tuple[str, ...]) -> None:
    message = refused(2, "from-file", write(tmp_path, config), *options.split())
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    ("config", "options", "words"),
    [
        ({}, "--lora-rank 8 --lora-targets q_proj,c_attn", "no module is called c_attn"),
        (NF4, "--lora-rank 8 --dora", "quantized as quantization_config of the config says"),
        ({}, "--batch 4", "the longest sample of a run decides its peak"),
        ({}, "--batch 4 --padding-mask", "padded to the longest of their micro-batch"),
        (GPTQ, "", "dequantized when they are loaded"),
        ({}, "--lora-rank 200 --lora-targets q_proj,k_proj", "defaults"),  # PEFT allows what only k_proj has not
    ],
    ids=lambda value: str(value)[:60],
)
def test_answered_with_what_is_assumed(tmp_path: Path, config: dict[str, Any], options: str, words: str) -> None:
    found = json.loads(run("from-file", write(tmp_path, config), *options.split(), "--json").stdout)
    assert any(words in line for line in lines(found)), lines(found)
