"""What people were told wrong about fine-tuning, with the right numbers, asked as a user asks: on the command line."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.cli_runs import run
from support.reports import lines
from support.shapes import decoder

from memcalc import ModelSpec, TrainingSetup, estimate

GB, GIB, MIB = 10**9, 2**30, 2**20


LLAMA_7B = decoder(4096, 32, 32, 32, 11008, 32000)
LLAMA_70B = decoder(8192, 80, 64, 8, 28672, 32000)
LLAMA3_8B = decoder(4096, 32, 32, 8, 14336, 128256, max_position_embeddings=131072)
TINYLLAMA = decoder(2048, 22, 32, 4, 5632, 32000)
OPEN_LLAMA_3B = decoder(3200, 26, 32, 32, 8640, 32000)
MIXTRAL = decoder(4096, 32, 32, 8, 14336, 32000, model_type="mixtral", num_local_experts=8)
QWEN25_7B = decoder(3584, 28, 28, 4, 18944, 152064, model_type="qwen2")
BERT_LARGE = {
    "model_type": "bert",
    "architectures": ["BertForSequenceClassification"],
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
    "vocab_size": 30522,
}
GPT2_LARGE = {
    "model_type": "gpt2",
    "n_embd": 1280,
    "n_layer": 36,
    "n_head": 20,
    "vocab_size": 50304,
    "n_positions": 1024,
}
STARCODER = {
    "model_type": "gpt_bigcode",
    "n_embd": 6144,
    "n_layer": 40,
    "n_head": 48,
    "vocab_size": 49152,
    "n_positions": 8192,
    "n_inner": 24576,
    "multi_query": True,
}


@pytest.fixture(name="ask")
def _ask(tmp_path: Path) -> Any:
    """The JSON that `memcalc from-file CONFIG OPTIONS` prints."""

    def ask(config: dict[str, Any], options: str) -> Any:
        path = tmp_path / "config.json"
        path.write_text(json.dumps(config))
        return json.loads(run("from-file", str(path), *options.split(), "--json").stdout)

    return ask


def allocated(report: Any) -> int:
    return int(report["peak"]["allocated_bytes"])


def said(report: Any, words: str) -> list[str]:
    return [line for line in lines(report) if words in line]


def row(report: Any, name: str, field: str = "max_bytes") -> Any:
    return report["components"][name][field]


@pytest.mark.parametrize(
    ("options", "mebibytes"),
    [
        ("--batch 1 --grad-accum 4 --precision fp32 --optimizer-impl for-loop", 8681),
        ("--batch 1 --grad-accum 4 --precision fp32 --optimizer-impl for-loop --activation-checkpointing full", 6775),
        (
            "--batch 1 --grad-accum 4 --precision mixed-fp16 --optimizer-impl for-loop --activation-checkpointing full",
            7275,
        ),
        (
            "--batch 1 --grad-accum 4 --precision mixed-fp16 --activation-checkpointing full --optimizer adafactor-hf",
            4847,
        ),
        (
            "--batch 1 --grad-accum 4 --precision mixed-fp16 --activation-checkpointing full --optimizer adamw-8bit",
            5363,
        ),
        # PyTorch of 2022 kept gradients between steps, as accumulation does, and the input of each softmax beside.
        ("--batch 4 --grad-accum 2 --precision fp32 --optimizer-impl for-loop", 14949 - 4 * 24 * 16),
        ("--batch 4 --grad-accum 2 --precision fp32 --optimizer adafactor-hf", 12295 - 4 * 24 * 16),
        ("--batch 4 --grad-accum 2 --precision fp32 --optimizer adamw-8bit", 13085 - 4 * 24 * 16),
    ],
)
def test_a_guide_s_runs_of_one_encoder(ask: Any, options: str, mebibytes: int) -> None:
    """BERT-large at 512 tokens on a V100, read off nvidia-smi with a context of 1,343 MiB."""
    found = ask(BERT_LARGE, f"{options} --seq-len 512 --attention eager --cuda-context 1343MiB")
    assert found["peak"]["process_bytes"] / MIB == pytest.approx(mebibytes, rel=0.06)


@pytest.mark.parametrize(
    ("optimizer", "gigabytes"),
    [("sgd", 27.0), ("adamw --optimizer-impl for-loop", 53.9), ("adamw", 67.4), ("adamw-8bit", 40.4)],
)
def test_a_step_takes_temporaries_by_its_implementation(ask: Any, optimizer: str, gigabytes: float) -> None:
    """A 7B all in 16 bits: states follow the weights' dtype, and foreach holds one more copy of them in its step."""
    found = ask(LLAMA_7B, f"--precision bf16 --seq-len 1 --optimizer {optimizer}")
    assert allocated(found) / GB == pytest.approx(gigabytes, rel=0.012)


def test_paged_states_lie_on_the_host(ask: Any) -> None:
    """A 70B in 16 bits needs 4 bytes a parameter on the GPU (34.5 GB on each of eight); its states are paged out."""
    found = ask(LLAMA_70B, "--precision bf16 --seq-len 16 --optimizer paged-adamw")
    standing = row(found, "model_weights") + row(found, "gradients") + row(found, "optimizer_states")
    assert standing / 8 / GB == pytest.approx(34.5, abs=0.1)
    (line,) = said(found, "paged in")
    assert "host memory: 513.9 GiB of paged-adamw states" in line  # 8 bytes a parameter


def test_weights_are_not_the_memory(ask: Any) -> None:
    """Full fine-tuning of a 7B: 16 bytes a parameter are 100.4 GiB before any activation, whatever the recipe."""
    for precision in ("fp32", "mixed-fp16"):
        found = ask(LLAMA_7B, f"--precision {precision} --seq-len 16 --gpu A100-80GB")
        parts = [part for name in ("model_weights", "optimizer_states") for part in row(found, name, "parts")]
        states = sum(part["bytes"] for part in parts if "copies" not in part["name"]) + row(found, "gradients")
        assert states / GIB == pytest.approx(100.4, abs=0.1)
        assert not found["gpu"]["fits"]


def test_loading_takes_host_memory(ask: Any) -> None:
    """Eight processes that load a 7B in fp32 hold 25.1 GiB each; in 16 bits half."""
    assert "25.1 GiB in each process" in said(ask(LLAMA_7B, "--precision fp32"), "host memory")[0]
    assert "12.6 GiB in each process" in said(ask(LLAMA_7B, "--precision bf16"), "host memory")[0]


@pytest.mark.parametrize(
    ("options", "gigabytes"),
    [
        ("--optimizer adamw-8bit", 21.0),
        ("--lora-rank 8 --quantization int8", 7.0),
        ("--lora-rank 32 --lora-targets all-linear --quantization nf4 --optimizer paged-adamw-8bit", 4.5),
    ],
    ids=["full", "8-bit base", "4-bit base"],
)
def test_three_ways_to_train_a_3b(ask: Any, options: str, gigabytes: float) -> None:
    """The examples pack sequences of 1,024; how many at once is not told, and one or two bracket what was measured."""
    one, two = (
        allocated(ask(OPEN_LLAMA_3B, f"--precision bf16 --activation-checkpointing full --seq-len {length} {options}"))
        for length in (1024, 2048)
    )
    assert one / GB * 0.95 <= gigabytes <= two / GB * 1.05


def test_a_new_token_makes_embedding_and_head_trainable(ask: Any) -> None:
    """262M more trained parameters, each with an fp32 copy, its gradient and two states: 16 bytes."""
    job = "--precision bf16 --quantization nf4 --lora-rank 64 --lora-targets all-linear --optimizer-impl fused"
    before, after = ask(LLAMA_7B, job), ask(LLAMA_7B, f"{job} --modules-to-save embed_tokens,lm_head")
    added = 2 * 32000 * 4096
    counts = [report["model"]["parameters"]["trainable"] for report in (before, after)]
    assert counts[1] - counts[0] == added
    peaks = [report["phases"]["step"]["peak_bytes"] for report in (before, after)]
    assert peaks[1] - peaks[0] == pytest.approx(16 * added, rel=0.001)


def test_quantizing_a_small_model_raises_its_peak(ask: Any) -> None:
    """Weights are 2.2 GB of a 1.1B's 10.7: what 4 bits save of them, copies in fp32 take several times over."""
    job = "--precision bf16 --lora-rank 32 --lora-targets q_proj,v_proj --batch 8 --seq-len 512"
    wide, packed = ask(TINYLLAMA, job), ask(TINYLLAMA, f"{job} --quantization nf4")
    assert allocated(packed) > allocated(wide) + 1.5 * GB
    assert said(packed, "quantizing raises the peak")
    assert not said(wide, "quantizing raises")
    assert not said(ask(LLAMA_7B, "--precision bf16 --lora-rank 8 --quantization nf4"), "quantizing raises")


def test_logits_dominate_a_small_model(ask: Any) -> None:
    """A 0.6B with four sequences of 3,072: states are 9.5 GB; logits of the 1,024 completed tokens 2.32 GiB a copy."""
    config = decoder(1024, 28, 16, 8, 3072, 151936, model_type="qwen3", head_dim=128, tie_word_embeddings=True)
    all_, some = (
        ask(config, f"--precision fp32 --batch 4 --seq-len 3072 {more}") for more in ("", "--logits-to-keep 1024")
    )
    assert all_["model"]["parameters"]["total"] == 596_049_920
    copy = 4 * 1024 * 151936 * 4
    assert copy / GIB == pytest.approx(2.32, abs=0.01)
    saved = [report["saved_for_backward_bytes"] for report in (all_, some)]
    assert saved[0] - saved[1] == pytest.approx(2 * copy, rel=0.02)  # the log-softmax of two thirds of the tokens
    assert allocated(all_) / GB > 6 * 9.5


@pytest.mark.parametrize(
    ("hidden", "width", "parameters", "mebibytes"),
    [(1024, 3072, 596_049_920, 49_273), (2048, 6144, 1_720_574_976, 78_147)],
    ids=["0.6B", "1.7B"],
)
def test_generated_completions_of_a_small_model(
    ask: Any, hidden: int, width: int, parameters: int, mebibytes: int
) -> None:
    """GRPO, four sequences of 2,048 + 1,024 tokens: nvidia-smi shows five times 16 bytes a parameter, and three.

    That nothing was checkpointed, and that there was a copy as reference, is taken from how large it was.
    """
    config = decoder(hidden, 28, 16, 8, width, 151936, model_type="qwen3", head_dim=128, tie_word_embeddings=True)
    found = ask(
        config,
        "--trainer plain --objective grpo --reference-model copy --batch 4 --seq-len 3072 --max-completion-length 1024",
    )
    assert found["model"]["parameters"]["trainable"] == parameters
    assert found["peak"]["process_bytes"] / MIB == pytest.approx(mebibytes, rel=0.08)


def test_the_second_step_decides(ask: Any) -> None:
    """A 7B's states appear at the end of the first step: 30 GB in 16 bits, 61 in fp32, counted in forward already."""
    for precision, gigabytes in (("bf16", 30.5), ("mixed-bf16", 60.9)):
        found = ask(QWEN25_7B, f"--precision {precision} --seq-len 64")
        assert row(found, "optimizer_states") / GB == pytest.approx(gigabytes, abs=0.1)
        assert found["phases"]["forward"]["peak_bytes"] > row(found, "optimizer_states") + row(
            found, "model_weights", "peak_bytes"
        )


def test_a_longer_context_costs_its_logits(ask: Any) -> None:
    """An 8B in NF4, checkpointed: 0.25 MiB of kept inputs a token (in 16 bits), and 12 bytes a logit of its head.

    2.53 MiB a token were published with the libraries of 2024, which held the logits in 16 and in 32 bits through
    backward: 6 bytes more. A loss that never makes the logits leaves none of it.
    """
    job = "--precision bf16 --quantization nf4 --no-prepare-kbit-training --lora-rank 32 --lora-targets all-linear "
    job += "--activation-checkpointing full --attention flash --optimizer paged-adamw-8bit"

    def slope(more: str) -> float:
        short, long = (allocated(ask(LLAMA3_8B, f"{job} {more} --seq-len {length}")) for length in (8192, 16384))
        return (long - short) / 8192

    inputs, logit = 32 * 4096 * 2, 128256
    assert slope("") == pytest.approx(inputs + 12 * logit, rel=0.01)
    assert (slope("") + 6 * logit) / MIB == pytest.approx(2.53, abs=0.1)
    assert slope("--loss-implementation cut-cross-entropy") < inputs + 0.6 * MIB


@pytest.mark.parametrize(("batch", "gigabytes"), [(4, 37.644), (8, 59.017)])
def test_logits_that_a_kernel_overwrites(ask: Any, batch: int, gigabytes: float) -> None:
    """An 8B's LoRA in 2024 with a cross-entropy that writes the gradient over fp32 logits.

    Transformers of that time cut the logits off before the loss, a copy in the width of 16 bits more at the peak.
    """
    job = "--precision bf16 --seq-len 4096 --attention flash --activation-checkpointing full --checkpoint-reentrant "
    job += "--lora-rank 16 --lora-targets q_proj,k_proj,v_proj,o_proj --lora-dropout 0.1"
    found = ask(LLAMA3_8B, f"{job} --batch {batch} --loss-implementation liger-cross-entropy")
    copy = 2 * batch * 4096 * 128256
    assert (allocated(found) + copy) / GB == pytest.approx(gigabytes, rel=0.005)
    assert allocated(found) < allocated(ask(LLAMA3_8B, f"{job} --batch {batch}")) - 2 * copy


def test_a_padded_vocabulary_s_logits(ask: Any) -> None:
    """GPT-2 774M, four sequences of 1,024, vocabulary padded to 50,304: 786.0 MiB of fp32 logits, more than once."""
    size = 4 * 1024 * 50304 * 4
    assert size == 786 * MIB
    found = ask(GPT2_LARGE, "--batch 4 --seq-len 1024 --precision fp32")
    parts = {part["name"]: part["bytes"] for part in row(found, "activations", "parts")}
    assert parts["head and loss"] == pytest.approx(size, rel=0.02)  # the log-softmax; logits are temporary
    assert row(found, "temporary_tensors") >= 2 * size
    exact = ask(GPT2_LARGE | {"vocab_size": 50257}, "--batch 4 --seq-len 1024 --precision fp32")
    assert allocated(found) - allocated(exact) == 47 * (4 * 1024 * 12 + 1280 * 12)


def test_scores_and_what_fused_attention_leaves(ask: Any) -> None:
    """A 15.5B with 48 heads at four times 2,048 tokens: 206 GiB by the published formula, of which scores are 150.

    Fused attention leaves the rest; eager attention here keeps its softmax in fp32 too, 7 bytes a score and not 5.
    """
    tokens, hidden, heads, length, depth = 4 * 2048, 6144, 48, 2048, 40
    scores = depth * 4 * heads * length**2
    formula = depth * tokens * hidden * (30 + 4 / heads + 5 * heads * length / hidden)
    assert formula / GIB == pytest.approx(206.4, abs=0.1)
    eager, fused = (
        ask(STARCODER, f"--precision fp16 --batch 4 --seq-len 2048 --attention {how}")["saved_for_backward_bytes"]
        for how in ("eager", "sdpa")
    )
    assert fused == pytest.approx(formula - 5 * scores, rel=0.06)
    assert eager - fused == pytest.approx(7 * scores, rel=0.04)


def test_a_gated_mlp_keeps_more_than_a_formula_for_gpt(ask: Any) -> None:
    """LLaMA-7B with eight sequences of 512: `12 hidden` a token and layer make 12 GB; PyTorch keeps over twice that."""
    found = ask(LLAMA_7B, "--precision bf16 --batch 8 --seq-len 512")["saved_for_backward_bytes"]
    assert found > 2 * 12 * GB
    assert ask(LLAMA_7B, "--precision bf16 --batch 8 --seq-len 512 --attention eager")["saved_for_backward_bytes"] > (
        1.5 * found
    )


@pytest.mark.parametrize(
    ("precision", "bytes_each"), [("fp32", (4, 8, 4)), ("bf16", (2, 4, 2)), ("mixed-bf16", (6, 8, 4))]
)
def test_bytes_per_parameter_are_printed_by_what_they_are(
    ask: Any, precision: str, bytes_each: tuple[int, ...]
) -> None:
    """16, 8 or 18: each is right for a recipe, so the decomposition is shown, and the batch it is for."""
    found = ask(LLAMA_7B, f"--precision {precision} --seq-len 16")
    rows = ("model_weights", "optimizer_states", "gradients")
    each = [row(found, name, "bytes_per_parameter") for name in rows]
    assert each == pytest.approx(bytes_each, rel=0.01)
    assert said(found, "micro-batch size 1")


def test_activations_of_experts_grow_with_those_a_token_meets(ask: Any) -> None:
    def saved(**more: int) -> int:
        report = estimate(ModelSpec.from_config({**MIXTRAL, **more}), TrainingSetup(precision="bf16", seq_len=512))
        return report.saved_for_backward_bytes or 0

    one, two, three = (saved(num_experts_per_tok=count) for count in (1, 2, 3))
    assert three - two == two - one == pytest.approx(32 * 512 * (4 * 2 * 14336 + 2 * 2 * 4096), rel=0.02)
    assert saved(num_local_experts=16) < 1.001 * two  # experts that a token does not meet keep nothing
