"""Objectives besides sft: what stands when, and which is larger than which. The measured rows hold the bytes."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.cli_runs import refused, run
from support.paths import DATA
from support.reports import lines

from memcalc import ModelSpec, Report, TrainingSetup, estimate, find_gpu
from memcalc.errors import UsageError

LLAMA = {
    "model_type": "llama",
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 512,
    "vocab_size": 4000,
}
SIZES: dict[str, Any] = {"batch": 2, "seq_len": 64}
LORA = {"lora_rank": 8}


def report(**options: Any) -> Report:
    """In a plain loop, whose objectives make full logits."""
    return estimate(ModelSpec.from_config(LLAMA), TrainingSetup(**SIZES | {"trainer": "plain"} | options))


def peak(**options: Any) -> int:
    return report(**options).peak.allocated_bytes


def parts(of: Report) -> dict[str, int]:
    return {part.name: part.bytes for part in of.components.model_weights.parts}


@pytest.mark.parametrize("more", [{}, LORA], ids=str)
@pytest.mark.parametrize("precision", ["bf16", "mixed-bf16", "fp32"])
def test_dpo_takes_no_less_than_sft_on_twice_the_batch(precision: str, more: dict[str, Any]) -> None:
    """With log-probabilities computed before it may, in 16 bits: the loss of sft goes through fp32 copies."""
    assert peak(objective="dpo", precision=precision, **more) >= peak(batch=4, precision=precision, **more)


@pytest.mark.parametrize("objective", ["dpo", "grpo", "ppo"])
@pytest.mark.parametrize("precision", ["bf16", "mixed-bf16", "fp32"])
def test_a_reference_costs_what_it_is(objective: str, precision: str) -> None:
    kinds = ["precomputed", "shared", "copy"]
    peaks = [peak(objective=objective, precision=precision, reference_model=kind, **LORA) for kind in kinds]
    assert peaks == sorted(peaks)
    assert peaks[1] < peaks[2]


def test_without_a_reference_grpo_takes_less_than_with_one() -> None:
    assert peak(objective="grpo", reference_model="none") < peak(objective="grpo")


def test_the_copy_stands_in_its_own_name_without_gradients_and_states() -> None:
    copied, before = (
        report(objective="dpo", reference_model="copy"),
        report(objective="dpo", reference_model="precomputed"),
    )
    weights = copied.model.parameters.total * 4
    assert weights <= parts(copied)["reference model"] < weights * 1.01
    assert "reference model" not in parts(before)
    assert copied.model == before.model
    assert copied.components.optimizer_states.max_bytes == before.components.optimizer_states.max_bytes
    assert copied.components.gradients.max_bytes == before.components.gradients.max_bytes


def test_a_reference_under_adapters_is_the_default_and_has_no_weights() -> None:
    shared = report(objective="dpo", **LORA)
    assert shared.setup["reference_model"] == "shared"
    assert "reference model" not in parts(shared)
    assert report(objective="dpo").setup["reference_model"] == "copy"


def test_a_pair_is_two_sequences() -> None:
    said = report(objective="dpo")
    assert said.setup["sequences"] == 4
    assert any("2 pairs (--batch), so 4 sequences of 64 tokens" in line for line in lines(said))


def test_a_reward_model_has_one_score_in_place_of_a_vocabulary() -> None:
    said, own = report(objective="reward"), report()
    assert said.model.parameters.total == own.model.parameters.total - 4000 * 256 + 256
    assert peak(objective="reward") < peak(batch=4)


def test_adapters_train_the_new_head_of_a_reward_model() -> None:
    said = report(objective="reward", **LORA)
    assert any("--modules-to-save score" in line for line in lines(said))
    assert said.model.parameters.trainable == report(**LORA).model.parameters.trainable + 256


def test_ppo_trains_a_value_model_and_has_two_more_beside_it() -> None:
    said, policy = report(objective="ppo"), report().model.parameters.total
    value = policy - 4000 * 256 + 256
    assert said.model.parameters.trainable == policy + value
    assert parts(said)["reward model"] == pytest.approx(4 * value, rel=0.01)
    assert parts(said)["reference model"] == pytest.approx(4 * policy, rel=0.01)
    assert peak(objective="ppo") > peak(objective="ppo", reference_model="none") > peak(objective="grpo")


def test_completions_alone_have_logits_in_grpo() -> None:
    assert peak(objective="grpo", max_completion_length=8) < peak(objective="grpo", max_completion_length=60)
    assert peak(objective="grpo", num_generations=4) == peak(objective="grpo", batch=8)


def test_chunks_of_entropies_are_followed_once() -> None:
    step = [peak(objective="dpo", seq_len=n, reference_model="precomputed") for n in (1025, 1537, 2049)]
    assert abs((step[2] - step[1]) - (step[1] - step[0])) <= 16384  # each length adds the same


def test_a_teacher_stands_in_its_own_name() -> None:
    teacher = ModelSpec.from_config({**LLAMA, "hidden_size": 512}, "larger")
    spec, setup = (
        ModelSpec.from_config(LLAMA),
        TrainingSetup(**SIZES, objective="distillation", max_completion_length=9),
    )
    said, own = estimate(spec, setup, teacher=teacher), estimate(spec, setup, teacher=spec)
    assert parts(said)["teacher"] > parts(own)["teacher"] >= own.model.parameters.total * 4
    assert said.setup["teacher"] == "larger"
    assert said.model == own.model
    assert own.peak.allocated_bytes > peak()


def test_a_teacher_needs_the_same_vocabulary() -> None:
    teacher = ModelSpec.from_config({**LLAMA, "vocab_size": 4001})
    with pytest.raises(UsageError, match="logits of 4001 tokens and the student of 4000"):
        estimate(ModelSpec.from_config(LLAMA), TrainingSetup(objective="distillation"), teacher=teacher)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--objective", "distillation"], "learns from a teacher"),
        (["--teacher", "1B"], "--teacher belongs to --objective distillation"),
        (["--objective", "distillation", "--teacher", "x y"], "--teacher cannot be"),
        (["--objective", "distillation", "--teacher", "./none.json"], "none.json"),
        (["--mode", "inference", "--teacher", "1B"], "--teacher belongs to"),
    ],
    ids=str,
)
def test_a_teacher_that_says_nothing_is_refused(options: list[str], message: str) -> None:
    assert message in refused(2 if "none" not in options[-1] else 1, "estimate", "--params", "1B", *options)


def test_the_command_line_reads_a_teacher(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "vocab_size": 128256}))
    sizes = [
        json.loads(
            run("estimate", "--params", "1B", "--objective", "distillation", "--teacher", given, "--json").stdout
        )
        for given in ("2B", str(tmp_path))
    ]
    assert sizes[0]["peak"]["allocated_bytes"] > sizes[1]["peak"]["allocated_bytes"]


def test_a_model_without_a_vocabulary_has_no_preferences() -> None:
    config = {**LLAMA, "model_type": "bert", "architectures": ["BertForMaskedLM"]}
    with pytest.raises(UsageError, match="--objective dpo needs the logits of a decoder"):
        estimate(ModelSpec.from_config(config), TrainingSetup(objective="dpo"))


def test_a_family_without_a_score_has_no_rewards() -> None:
    row = json.loads((DATA / "measured" / "llava.jsonl").read_text().splitlines()[0])
    spec = ModelSpec.from_config(row["case"]["config"])
    with pytest.raises(UsageError, match="--objective reward needs a head of one score"):
        estimate(spec, TrainingSetup(objective="reward", seq_len=row["case"]["seq"]))


def test_the_command_line_tells_the_reference() -> None:
    out = run("estimate", "--params", "1B", "--objective", "dpo", "--json")
    answer = json.loads(out.stdout)
    names = [part["name"] for part in answer["components"]["model_weights"]["parts"]]
    assert "reference model" in names
    assert answer["setup"]["reference_model"] == "copy"


QWEN3 = {
    "model_type": "qwen3",
    "hidden_size": 1024,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 3072,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}


@pytest.mark.parametrize(
    ("shape", "parameters", "mebibytes"),
    [({}, 596049920, 49273), ({"hidden_size": 2048, "intermediate_size": 6144}, 1720574976, 78147)],
    ids=["0.6B", "1.7B"],
)
def test_logits_dominate_grpo(shape: dict[str, int], parameters: int, mebibytes: int) -> None:
    """huggingface/trl issue 3456: nvidia-smi of two runs on an A100-80GB (batch 4, prompt 2048, completion 1024).

    An older TRL; precision (autocast), reference and checkpointing (none) are not said there and assumed.
    """
    spec = ModelSpec.from_config({**QWEN3, **shape})
    setup = TrainingSetup(objective="grpo", trainer="plain", batch=4, seq_len=3072, max_completion_length=1024)
    said = estimate(spec, setup, find_gpu("A100-80GB"))
    assert said.model.parameters.total == parameters
    assert said.peak.process_bytes / 2**20 == pytest.approx(mebibytes, rel=0.07)
    logits = next(part.bytes for part in said.components.activations.parts if part.name == "head and loss")
    assert logits > 4 * 1024 * 151936 * 4  # more than one copy in fp32


def test_states_of_the_optimizer_stand_in_every_phase() -> None:
    """huggingface/trl issue 2972: GRPO of a 7B model fits in its first step, and no longer in its second."""
    config = {
        "model_type": "qwen2",
        "hidden_size": 3584,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "intermediate_size": 18944,
        "vocab_size": 152064,
    }
    setup = TrainingSetup(
        objective="grpo", trainer="plain", num_generations=2, seq_len=512, max_completion_length=256, precision="bf16"
    )
    said = estimate(ModelSpec.from_config(config), setup)
    states = 4 * said.model.parameters.total
    assert said.model.parameters.total == 7615616512
    assert said.components.optimizer_states.max_bytes == pytest.approx(states, rel=0.001)
    assert said.phases.forward.peak_bytes > 2 * said.model.parameters.total * 2 + states
