"""Options of other tools get an answer by their meaning, and never a suggestion that is wrong."""

import re

import pytest
from support.cli_runs import refused, run

from memcalc.cli.other_tools import _MEANINGS

LATER = {
    "--parallel",
    "--data-parallel-size",
    "--pipeline-parallel-size",
    "--context-parallel-size",
    "--expert-parallel-size",
}
"""Options that answers name where the command has them."""


def options() -> set[str]:
    return set(re.findall(r"--[a-z0-9-]+", run("from-file", "--help").stdout))


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("--load-in-4bit", ("--quantization nf4", "--lora-rank")),
        ("--load_in_8bit", ("--quantization int8",)),
        ("--per-device-train-batch-size 4", ("--batch",)),
        ("--per_device_train_batch_size=4", ("--batch",)),
        ("--gradient-accumulation-steps 2", ("--grad-accum",)),
        ("--bf16", ("--precision bf16", "--precision mixed-bf16")),
        ("--fp16 true", ("--precision mixed-fp16",)),
        ("--use-liger-kernel", ("--kernels liger", "--loss-implementation liger")),
        ("--gradient-checkpointing", ("--activation-checkpointing full",)),
        ("--optim adamw_torch", ("--optimizer",)),
        ("--sample-packing", ("--packing", "--batch 1", "--seq-len")),
        ("--cutoff-len 2048", ("--seq-len",)),
        ("--max-model-len 4096", ("--seq-len", "--max-new-tokens")),
        ("--ctx-size 4096", ("--seq-len",)),
        ("-c 4096", ("--seq-len",)),
        ("--max-running-requests 8", ("--batch",)),
        ("--chunked-prefill-size 8192", ("--prefill-chunk-size",)),
        ("--kv-cache-dtype fp8", ("--kv-dtype",)),
        ("-ctk q8_0", ("--cache-type-k",)),
        ("-ngl 20", ("--n-gpu-layers",)),
        ("--lora-r 16", ("--lora-rank",)),
        ("--lora-alpha 32", ("changes no memory",)),
        ("--tp 2", ("--tensor-parallel-size",)),
        ("--learning-rate 1e-4", ("changes no memory",)),
        ("--model x", ("without an option",)),
        ("--torch-compile", ("eager",)),
        ("--fp16-opt-level O2", ("Apex is not computed",)),
        ("--fp8-recipe delayed", ("TransformerEngine", "--float8-recipe")),
        ("--enable-lora", ("not computed",)),
        ("--additional-target x", ("--modules-to-save",)),
        ("--hub-model-id x", ("changes no memory",)),
    ],
)
def test_by_meaning(typed: str, words: tuple[str, ...]) -> None:
    message = refused(2, "estimate", "--params", "1B", *typed.split())
    assert f"There is no option {re.split('[ =]', typed)[0]} here" in message
    assert all(word in message for word in words), message


@pytest.mark.parametrize("typed", ["--fsdp", "--zero-stage", "--deepspeed", "--num-gpus", "--pp"])
def test_sharding_is_never_a_dtype(typed: str) -> None:
    message = refused(2, "estimate", "--params", "1B", typed, "2")
    assert "--dtype" not in message
    assert "parallel" in message or "not computed" in message


@pytest.mark.parametrize(("typed", "near"), [("--sec-len", "--seq-len"), ("--optimiser", "--optimizer")])
def test_a_slip_of_the_pen(typed: str, near: str) -> None:
    assert f"did you mean {near}" in refused(2, "estimate", "--params", "1B", typed, "2")


@pytest.mark.parametrize("typed", ["--xyzzy", "--frobnicate-all", "-z"])
def test_what_is_like_nothing_has_no_suggestion(typed: str) -> None:
    message = refused(2, "estimate", "--params", "1B", typed)
    assert "did you mean" not in message
    assert typed[:2] in message


def test_every_answer_names_options_that_exist() -> None:
    known = options() | LATER
    for _, meaning in _MEANINGS:
        assert set(re.findall(r"{(--[a-z0-9-]+)}", meaning)) <= known, meaning
