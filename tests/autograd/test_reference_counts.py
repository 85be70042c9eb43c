"""Lifetimes rest on CPython's reference counts: calibrated at import, and refused where they do not hold."""

import gc
from collections.abc import Iterator
from typing import Any

import pytest

from memcalc import InferenceSetup, ModelSpec, TrainingSetup
from memcalc.autograd import reference_counts
from memcalc.autograd.graph import Node
from memcalc.autograd.reference_counts import only_reference
from memcalc.autograd.tensor import Storage, Tensor
from memcalc.errors import UnsupportedPythonError
from memcalc.inference.generate import generate
from memcalc.training.step import _trace, trace
from memcalc.training.traced_step import Step

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 100,
}


def test_a_second_reference_is_seen() -> None:
    held: list[object] = [object()]
    assert only_reference(held)
    other = held[0]
    assert not only_reference(held)
    del other
    assert only_reference(held)


@pytest.mark.parametrize("count", [0, 2, 1 << 30])
def test_counts_that_do_not_tell_are_refused(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference_counts, "getrefcount", lambda _: count)
    with pytest.raises(UnsupportedPythonError, match="run it with CPython"):
        reference_counts._measured()


def test_objects_that_outlive_their_last_reference_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(reference_counts._Probe, "__del__")
    with pytest.raises(UnsupportedPythonError):
        reference_counts._measured()
    reference_counts._Probe.alive = 0


@pytest.fixture
def eager_collector() -> Iterator[list[Any]]:
    """The collector runs after every tenth new container; what it found that nothing but itself could have freed."""
    before = gc.get_threshold()
    _trace.cache_clear()  # models of earlier tests refer to themselves
    gc.collect()
    gc.set_threshold(10, 1, 1)
    gc.set_debug(gc.DEBUG_SAVEALL)
    yield gc.garbage
    gc.set_debug(0)
    gc.set_threshold(*before)
    gc.garbage.clear()


@pytest.mark.parametrize(
    "setup",
    [
        TrainingSetup(batch=2, seq_len=64),
        TrainingSetup(batch=2, seq_len=64, activation_checkpointing="full"),
        TrainingSetup(batch=2, seq_len=64, precision="mixed-bf16", lora_rank=4, trainer="trl"),
        TrainingSetup(batch=2, seq_len=64, activation_offloading=True),
        InferenceSetup(batch=2, seq_len=64),
    ],
    ids=["training", "checkpointed", "lora", "offloaded", "inference"],
)
def test_a_collector_that_runs_in_between_changes_nothing(setup: Any, eager_collector: list[Any]) -> None:
    spec = ModelSpec.from_config(LLAMA)
    gc.disable()
    quiet = _run(spec, setup)
    _trace.cache_clear()
    gc.enable()
    runs = gc.get_stats()[0]["collections"]
    disturbed = _run(spec, setup)
    assert gc.get_stats()[0]["collections"] > runs + 20, "the collector hardly ran"
    assert [(a.born, a.dies, a.nbytes) for a in disturbed.tape.allocations] == [
        (a.born, a.dies, a.nbytes) for a in quiet.tape.allocations
    ]
    assert [item for item in eager_collector if isinstance(item, (Storage, Tensor, Node))] == []


def _run(spec: ModelSpec, setup: Any) -> Step:
    return generate(spec, setup) if isinstance(setup, InferenceSetup) else trace(spec, setup)
