"""Laws of fine-tuning: what adapters, quantized bases, frozen weights, checkpointing and accumulation can never do."""

from itertools import pairwise
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memcalc import ModelSpec, Report, TrainingSetup, estimate

COMMON = {"num_hidden_layers": 4, "vocab_size": 4096}
DECODER = {
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 512,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": DECODER,
    "qwen3": {**DECODER, "tie_word_embeddings": True},
    "gemma2": {**DECODER, "sliding_window": 32},
    "mixtral": {**DECODER, "num_local_experts": 4, "num_experts_per_tok": 2},
    "phi3": {**DECODER, "head_dim": None},
    "gpt_neox": {**DECODER, "num_key_value_heads": None, "head_dim": None},
    "bert": {"hidden_size": 256, "num_attention_heads": 4, "intermediate_size": 1024},
}
DECODERS = st.sampled_from([name for name in FAMILIES if name != "bert"])
SETUPS = st.fixed_dictionaries(
    {
        "batch": st.integers(1, 3),
        "seq_len": st.sampled_from([8, 33, 160]),
        "precision": st.sampled_from(["bf16", "mixed-bf16", "fp32"]),
        "attention": st.sampled_from(["eager", "sdpa"]),
        "activation_checkpointing": st.sampled_from(["none", "full"]),
        "optimizer": st.sampled_from(["adamw", "sgd", "adamw-8bit", "adafactor"]),
    }
)
BASES = st.sampled_from(["nf4", "nf4-double", "fp4", "int8"])
laws = settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def run(family: str, setup: dict[str, Any], **changes: Any) -> Report:
    spec = ModelSpec.from_config({"model_type": family, **COMMON, **FAMILIES[family]})
    return estimate(spec, TrainingSetup(**(setup | changes)))


def weights(report: Report, *, base_only: bool = False) -> int:
    """Bytes of the weights without their 16-bit copies, and without adapters where only the base is asked."""
    left_out = ("copies", "LoRA") if base_only else ("copies",)
    parts = report.components.model_weights.parts
    return sum(part.bytes for part in parts if not any(word in part.name for word in left_out))


@laws
@given(st.sampled_from(list(FAMILIES)), SETUPS, BASES)
def test_a_quantized_base_takes_no_more_than_a_wide_one(family: str, setup: dict[str, Any], base: str) -> None:
    """Weights: quantized base at most that of LoRA, whose base is at most full fine-tuning's (adapters aside)."""
    adapters = {"lora_rank": 4, "lora_targets": "all-linear"}
    full, lora = run(family, setup), run(family, setup, **adapters)
    packed = run(family, setup, **adapters, quantization=base, prepare_kbit_training=False)
    assert weights(packed, base_only=True) <= weights(lora, base_only=True) <= weights(full)
    assert weights(packed) <= weights(lora)


@laws
@given(SETUPS, BASES, st.sampled_from(["llama", "qwen3"]), st.booleans())
def test_a_base_does_not_depend_on_what_is_adapted(
    setup: dict[str, Any], base: str, family: str, prepare: bool
) -> None:
    targets = ("all-linear", "q_proj,v_proj", "down_proj", "o_proj,gate_proj,up_proj")
    options = {"quantization": base, "prepare_kbit_training": prepare, "lora_rank": 4}
    sizes = {weights(run(family, setup, lora_targets=which, **options), base_only=True) for which in targets}
    assert len(sizes) == 1


@laws
@given(st.sampled_from(list(FAMILIES)), SETUPS, st.sampled_from(["none", "nf4"]), st.integers(1, 100))
def test_a_higher_rank_never_lowers_memory(family: str, setup: dict[str, Any], base: str, rank: int) -> None:
    options = {"quantization": base, "lora_targets": "all-linear"}
    low, high = (run(family, setup, lora_rank=r, **options) for r in (rank, rank + 9))
    assert low.peak.process_bytes <= high.peak.process_bytes
    assert low.model.parameters.trainable < high.model.parameters.trainable
    assert (low.saved_for_backward_bytes or 0) <= (high.saved_for_backward_bytes or 0)


@laws
@given(DECODERS, SETUPS, st.sampled_from([1, 2]))
def test_freezing_more_never_raises_memory(family: str, setup: dict[str, Any], accumulation: int) -> None:
    """From all blocks to none, the head alone at last."""
    reports = [run(family, setup, grad_accum=accumulation)]
    reports += [run(family, setup, grad_accum=accumulation, train_only=f"last-{count}") for count in (4, 3, 2, 1)]
    reports.append(run(family, setup, grad_accum=accumulation, freeze="embedding"))
    for more, less in pairwise(reports[:5]):
        assert less.peak.process_bytes <= more.peak.process_bytes
        assert less.model.parameters.trainable < more.model.parameters.trainable
        assert (less.saved_for_backward_bytes or 0) <= (more.saved_for_backward_bytes or 0)
    assert reports[5].peak.process_bytes <= reports[0].peak.process_bytes


@laws
@given(DECODERS, SETUPS, st.sampled_from([None, 8]))
def test_checkpointing_fewer_blocks_lies_between_none_and_all(
    family: str, setup: dict[str, Any], rank: int | None
) -> None:
    setup = {name: value for name, value in setup.items() if name != "activation_checkpointing"}
    options: dict[str, Any] = {"lora_rank": rank, "lora_targets": "all-linear"} if rank else {}
    saved = [
        run(
            family, setup, activation_checkpointing="full", checkpoint_every_n_blocks=every, **options
        ).saved_for_backward_bytes
        for every in (1, 2, 4)
    ]
    saved.append(run(family, setup, **options).saved_for_backward_bytes)
    for fewer, more in pairwise(saved):
        assert (fewer or 0) <= (more or 0)
    host = run(family, setup, activation_offloading=True, **options)
    assert (host.saved_for_backward_bytes or 0) <= (saved[-1] or 0)


@laws
@given(st.sampled_from(list(FAMILIES)), SETUPS, st.sampled_from([None, 8]))
def test_accumulation_adds_at_most_the_gradients(family: str, setup: dict[str, Any], rank: int | None) -> None:
    """And neither how often, nor what is saved for backward, matters."""
    options: dict[str, Any] = {"lora_rank": rank, "lora_targets": "all-linear"} if rank else {}
    once, twice, often = (run(family, setup, grad_accum=count, **options) for count in (1, 2, 64))
    assert twice.peak == often.peak
    assert once.saved_for_backward_bytes == twice.saved_for_backward_bytes
    assert once.peak.allocated_bytes <= twice.peak.allocated_bytes
    assert twice.peak.allocated_bytes <= once.peak.allocated_bytes + once.components.gradients.max_bytes


@laws
@given(
    st.sampled_from(list(FAMILIES)), SETUPS, st.sampled_from(["batch", "seq_len"]), st.sampled_from(["none", "int8"])
)
def test_memory_never_falls_with_more_tokens(family: str, setup: dict[str, Any], what: str, base: str) -> None:
    options = {"lora_rank": 4, "quantization": base, "lora_targets": "all-linear"}
    short, long = run(family, setup, **options), run(family, setup, **options, **{what: setup[what] + 5})
    assert short.peak.process_bytes <= long.peak.process_bytes
    assert (short.saved_for_backward_bytes or 0) <= (long.saved_for_backward_bytes or 0)


@laws
@given(
    DECODERS,
    SETUPS,
    st.sampled_from(["none", "nf4", "int8", "gptq-4", "awq-4", "fp8"]),
    st.sampled_from(["eager", "liger", "chunked"]),
)
def test_rows_sum_to_the_process(family: str, setup: dict[str, Any], base: str, loss: str) -> None:
    targets = "q_proj,v_proj" if family == "mixtral" else "all-linear"  # PEFT adapts no packed experts
    report = run(family, setup, quantization=base, lora_rank=4, lora_targets=targets, loss_implementation=loss)
    rows = [row for _, row in report.components.rows()]
    assert sum(row.peak_bytes for row in rows) == report.peak.process_bytes
    assert all(row.max_bytes >= row.peak_bytes == sum(part.bytes for part in row.parts) for row in rows)
    phases = (report.phases.forward, report.phases.backward, report.phases.step)  # type: ignore[union-attr]
    assert report.peak.allocated_bytes >= max(phase.peak_bytes for phase in phases)


@laws
@given(DECODERS, SETUPS, st.integers(1, 31))
def test_fewer_logits_never_take_more(family: str, setup: dict[str, Any], keep: int) -> None:
    setup = setup | {"seq_len": 33}
    some, most, all_ = (run(family, setup, logits_to_keep=count) for count in (keep, keep + 1, 33))
    assert some.peak.process_bytes <= most.peak.process_bytes <= all_.peak.process_bytes
    assert all_.peak.process_bytes >= run(family, setup).peak.process_bytes  # a slice more, if anything
