"""Megatron-Core's layers and distributed optimizer, against Megatron-Core 0.16.1 on PyTorch's real allocator.

Each row of `megatron.jsonl` is one rank of GPTModel with its local spec, where "flash" puts torch's flash attention in
the place of its attention that is written out; live tensors are counted rounded to 512 bytes, workspaces taken off.
"""

import json
from typing import Any

import pytest
from support.paths import DATA

from memcalc import ModelSpec, TrainingSetup, canonical_spec, estimate
from memcalc.errors import UsageError
from memcalc.parallel.layout import layout_of
from memcalc.peak.pipeline import trace_rank
from memcalc.peak.ranks import phase_totals
from memcalc.peak.sweep import Sweep
from memcalc.tables.cuda_devices import CudaDevice
from memcalc.training.step import trace
from memcalc.training.traced_step import Step, Tracing

ROWS = [json.loads(line) for line in (DATA / "megatron.jsonl").read_text().splitlines()]
STAGES = [row for row in ROWS if "pp" in row["case"]]
WHOLE = [row for row in ROWS if "pp" not in row["case"]]
FLASH = CudaDevice((8, 0), 132)


def name_of(row: dict[str, Any]) -> str:
    return "-".join(f"{key}{value}" for key, value in row["case"].items()) or "plain"


def config_of(case: dict[str, Any]) -> dict[str, Any]:
    biases = {"attention_bias": True, "mlp_bias": True} if case.get("bias") else {}
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": case.get("vocab", 1024),
        "hidden_size": case.get("hidden", 256),
        "intermediate_size": case.get("ffn", 1024),
        "num_hidden_layers": case.get("layers", 4),
        "num_attention_heads": case.get("heads", 8),
        "num_key_value_heads": case.get("kv", 8),
        "tie_word_embeddings": case.get("tied", False),
        **biases,
    }


def setup_of(case: dict[str, Any]) -> TrainingSetup:
    """A case as options; the rows' optimizer is the one that Megatron falls back to, torch's foreach AdamW."""
    names = {"method": "recompute_method", "num_layers": "recompute_num_layers"}
    said = {option: case[key] for key, option in names.items() if key in case}
    if "modules" in case:
        said["recompute_modules"] = ",".join(case["modules"])
    return TrainingSetup(
        batch=case.get("batch", 2),
        seq_len=case.get("seq", 128),
        precision="bf16",
        optimizer_impl="foreach",
        parallel="megatron",
        attention="eager" if case.get("attn") == "local" else "sdpa",
        data_parallel_size=case.get("dp", 1),
        tensor_parallel_size=case.get("tp", 1),
        sequence_parallel=case.get("sp", False),
        grad_accum=case.get("micro", 1),
        activation_checkpointing=case.get("recompute", "none"),
        **said,
    )


def step_of(case: dict[str, Any], **more: Any) -> Step:
    spec, setup = ModelSpec.from_config(config_of(case)), setup_of(case).model_copy(update=more)
    return trace(spec, setup, layout=layout_of(setup, spec.config), tracing=Tracing(device=FLASH))


@pytest.mark.parametrize("row", WHOLE, ids=name_of)
def test_every_phase_to_the_byte(row: dict[str, Any]) -> None:
    step = step_of(row["case"])
    for phase, found in phase_totals(step).items():
        assert found + step.input_bytes == row["phase_rounded"][phase] - row["workspaces"], phase


@pytest.mark.parametrize("row", STAGES, ids=name_of)
def test_a_stage_of_a_pipeline(row: dict[str, Any]) -> None:
    """Within 0.5 %: the rows run every micro-batch on the same ids, and a send may still hold what it sent."""
    case = row["case"]
    virtual = case.get("virtual", 1)
    setup = setup_of(case).model_copy(
        update={
            "pipeline_parallel_size": case["pp"],
            "pipeline_schedule": "interleaved" if virtual > 1 else "1f1b",
            "virtual_pipeline_size": virtual,
            "microbatches": case.get("microbatches", 4),
        }
    )
    spec = ModelSpec.from_config(config_of(case))
    layout = layout_of(setup, spec.config)
    step = trace_rank(spec, setup, layout, case["rank"], tracing=Tracing(device=FLASH))
    totals = phase_totals(step)
    found = {"backward": max(totals["forward"], totals["backward"]), "step": totals["step"]}
    for phase, nbytes in found.items():
        assert nbytes + step.input_bytes == pytest.approx(row["phase_rounded"][phase] - row["workspaces"], rel=5e-3), (
            phase
        )


HIDDEN, LENGTH, HEADS = 1024, 512, 16


def kept_by_a_layer(ranks: int, *, sequence: bool, attention: str, checkpointing: str) -> float:
    """Bytes that a layer keeps from forward to backward, as a multiple of s b h. StarCoder 2 is GPT, with rotation."""
    config = {
        "model_type": "starcoder2",
        "vocab_size": 1024,
        "hidden_size": HIDDEN,
        "intermediate_size": 4 * HIDDEN,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        **dict.fromkeys(("residual_dropout", "embedding_dropout", "attention_dropout"), 0.1),
    }
    setup = TrainingSetup(
        batch=1,
        seq_len=LENGTH,
        precision="bf16",
        parallel="megatron",
        tensor_parallel_size=ranks,
        sequence_parallel=sequence,
        attention=attention,  # type: ignore[arg-type]
        activation_checkpointing=checkpointing,  # type: ignore[arg-type]
    )
    kept = []
    for depth in (4, 5):
        spec = ModelSpec.from_config({**config, "num_hidden_layers": depth})
        step = trace(spec, setup, layout=layout_of(setup, spec.config), tracing=Tracing(device=FLASH))
        kept.append(Sweep(step.tape).saved_for_backward(step.forward_end))
    return (kept[1] - kept[0]) / (LENGTH * HIDDEN)


@pytest.mark.parametrize(("ranks", "sequence"), [(1, False), (2, False), (4, False), (4, True), (8, True)])
def test_activations_of_a_layer_are_korthikantis(ranks: int, sequence: bool) -> None:
    """Korthikanti et al. 2022 (arXiv:2205.05198), table 2: sbh(10 + 24/t), and sbh 34/t with sequence parallel.

    The paper has no rotation, which keeps queries and keys of its own (4/t) and cos and sin, and does not count the
    norms' statistics. Its softmax is one 16-bit kernel of 5as/h; written out it is in fp32, and takes 7.
    """
    divided = ranks if sequence else 1
    paper = 34 / ranks if sequence else 10 + 24 / ranks
    rotation = 4 / ranks + 4 * 2 * (HIDDEN // HEADS) / HIDDEN
    statistics = 2 * 2 * 4 / HIDDEN / divided
    scores = 7 * HEADS * LENGTH / HIDDEN / ranks
    recomputed = kept_by_a_layer(ranks, sequence=sequence, attention="eager", checkpointing="selective")
    assert recomputed == pytest.approx(paper + rotation + statistics, rel=1e-9)
    eager = kept_by_a_layer(ranks, sequence=sequence, attention="eager", checkpointing="none")
    assert eager == pytest.approx(recomputed + scores, rel=1e-9)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lora_rank": 8}, "full training in 16 bits"),
        ({"padding_mask": True}, "rows without padding"),
        ({"recompute_method": "block"}, "--activation-checkpointing full"),
        ({"recompute_modules": "router", "activation_checkpointing": "selective"}, "cannot be 'router'"),
        ({"pipeline_parallel_size": 2, "pipeline_schedule": "gpipe"}, "has no GPipe"),
        ({"pipeline_parallel_size": 3}, "no multiple of 3 stages"),
        ({"tensor_parallel_size": 16}, "does not divide the key-value heads 8"),
        ({"context_parallel_size": 2}, "is Transformer Engine's in Megatron-Core"),
        ({"trainer": "hf"}, "a loop of its own"),
    ],
)
def test_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        estimate(canonical_spec(8 * 10**9)[0], TrainingSetup(parallel="megatron", **options))


def test_other_families_are_refused_by_name() -> None:
    for model_type in ("t5", "mixtral", "gemma2", "mamba"):
        with pytest.raises(UsageError, match="--parallel megatron is described for dense decoders"):
            estimate(ModelSpec.from_config({"model_type": model_type}), TrainingSetup(parallel="megatron"))
