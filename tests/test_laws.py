"""Laws that every estimate keeps, whatever the shape."""

from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memcalc import ModelSpec, Report, TrainingSetup, estimate
from memcalc.estimation import estimate as estimation
from memcalc.nn.run_context import run_context
from memcalc.training.step import _trace, trace

SHAPES = st.fixed_dictionaries(
    {
        "model_type": st.sampled_from(["llama", "qwen2", "qwen3", "mistral"]),
        "vocab_size": st.sampled_from([70, 1000, 32000]),
        "hidden_size": st.sampled_from([64, 192, 320]),
        "intermediate_size": st.sampled_from([96, 512]),
        "num_hidden_layers": st.integers(1, 6),
        "num_attention_heads": st.sampled_from([4, 8]),
        "num_key_value_heads": st.sampled_from([1, 2, 4]),
        "head_dim": st.sampled_from([16, 36, 64]),
        "tie_word_embeddings": st.booleans(),
    }
)
SETUPS = st.fixed_dictionaries(
    {
        "batch": st.integers(1, 4),
        "seq_len": st.integers(2, 200),
        "precision": st.sampled_from(["fp32", "bf16", "fp16", "mixed-bf16", "mixed-fp16"]),
        "attention": st.sampled_from(["eager", "sdpa", "flash"]),
        "padding_mask": st.booleans(),
        "activation_checkpointing": st.sampled_from(["none", "full"]),
        "optimizer": st.sampled_from(["adamw", "sgd", "sgd-momentum", "adafactor"]),
        "grad_accum": st.sampled_from([1, 2]),
        "keep_logits": st.booleans(),
    }
)
laws = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def run(shape: dict[str, Any], setup: dict[str, Any], **changes: Any) -> Report:
    return estimate(ModelSpec.from_config(shape), TrainingSetup(**(setup | changes)))


@laws
@given(SHAPES, SETUPS)
def test_rows_sum_to_the_total_and_none_is_negative(shape: dict[str, Any], setup: dict[str, Any]) -> None:
    report = run(shape, setup)
    rows = [row for _, row in report.components.rows()]
    assert sum(row.peak_bytes for row in rows) == report.peak.process_bytes
    assert all(part.bytes >= 0 for row in rows for part in row.parts)
    assert all(row.max_bytes >= row.peak_bytes >= 0 for row in rows)
    top = max(phase.peak_bytes for phase in (report.phases.forward, report.phases.backward, report.phases.step))  # type: ignore[union-attr]
    assert report.peak.allocated_bytes >= top


@laws
@given(SHAPES, SETUPS, st.sampled_from(["batch", "seq_len"]))
def test_memory_never_falls_when_the_batch_grows(shape: dict[str, Any], setup: dict[str, Any], what: str) -> None:
    """What a caching allocator holds may fall: a larger request can fill a block that a smaller one leaves open."""
    larger = setup | {what: int(setup[what]) + 1}
    assert tensors(shape, larger) >= tensors(shape, setup)


def tensors(shape: dict[str, Any], setup: dict[str, Any]) -> int:
    """Bytes at the peak, whatever the allocator makes of them."""
    return estimation.estimate(ModelSpec.from_config(shape), TrainingSetup(**setup), simulate=False).peak.process_bytes


@laws
@given(SHAPES, SETUPS)
def test_memory_never_falls_when_the_model_is_deeper(shape: dict[str, Any], setup: dict[str, Any]) -> None:
    deeper = shape | {"num_hidden_layers": int(shape["num_hidden_layers"]) + 1}
    assert tensors(deeper, setup) >= tensors(shape, setup)


@laws
@given(SHAPES, SETUPS)
def test_checkpointing_never_raises_what_is_saved(shape: dict[str, Any], setup: dict[str, Any]) -> None:
    full = run(shape, setup, activation_checkpointing="full").saved_for_backward_bytes
    none = run(shape, setup, activation_checkpointing="none").saved_for_backward_bytes
    assert full is not None
    assert none is not None
    assert full <= none


@laws
@given(SHAPES, SETUPS)
def test_accumulation_never_changes_activations(shape: dict[str, Any], setup: dict[str, Any]) -> None:
    once, twice = run(shape, setup, grad_accum=1), run(shape, setup, grad_accum=4)
    assert once.saved_for_backward_bytes == twice.saved_for_backward_bytes


@laws
@given(SHAPES, SETUPS)
def test_an_estimate_is_deterministic(shape: dict[str, Any], setup: dict[str, Any]) -> None:
    first = run(shape, setup)
    _trace.cache_clear()  # or the step of the first would answer again
    assert run(shape, setup) == first
    assert _trace.cache_info().misses


@given(st.sampled_from([2, 7, 40, 400]))
def test_cost_does_not_grow_with_depth(depth: int) -> None:
    shape = {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "vocab_size": 70,
        "num_hidden_layers": depth,
    }
    step = trace(ModelSpec.from_config(shape), TrainingSetup())
    assert run_context(step.tape).traced_blocks == min(
        depth, 3
    )  # the first, the last, and one that answers for all others


@laws
@given(SHAPES, SETUPS)
def test_a_deep_model_is_the_sum_of_its_blocks(shape: dict[str, Any], setup: dict[str, Any]) -> None:
    """Each block beyond the second adds the same to what is saved: nothing is lost between the blocks."""
    saved = [run(shape | {"num_hidden_layers": depth}, setup).saved_for_backward_bytes for depth in (3, 4, 5, 12)]
    one = saved[1] - saved[0]  # type: ignore[operator]
    assert saved[2] == saved[1] + one  # type: ignore[operator]
    assert saved[3] == saved[1] + 8 * one  # type: ignore[operator]
