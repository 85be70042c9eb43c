"""Witnesses from papers and pages: closed formulas that the op lists must reproduce."""

from typing import Any

import pytest

from memcalc import ModelSpec, TrainingSetup, canonical_spec, estimate
from memcalc.optim.weight import Weight
from memcalc.peak.sweep import Sweep
from memcalc.report.schema import Report
from memcalc.tables.optimizers import OPTIMIZERS
from memcalc.training.step import trace


def gpt2_shape(hidden: int, heads: int, layers: int) -> dict[str, Any]:
    return {
        "model_type": "gpt2",
        "vocab_size": 96,
        "n_embd": hidden,
        "n_head": heads,
        "n_layer": layers,
        "n_positions": 4096,
        "activation_function": "gelu",
    }


def saved_per_block(hidden: int, heads: int, batch: int, length: int) -> int:
    """Bytes that one further block keeps for backward, in bf16 with eager attention and dropout."""
    setup = TrainingSetup(batch=batch, seq_len=length, precision="bf16", attention="eager")
    saved = []
    for layers in (2, 3):
        step = trace(ModelSpec.from_config(gpt2_shape(hidden, heads, layers)), setup)
        saved.append(Sweep(step.tape).saved_for_backward(step.forward_end))
    return saved[1] - saved[0]


@pytest.mark.parametrize(("hidden", "heads", "batch", "length"), [(256, 4, 2, 128), (512, 8, 1, 256), (384, 6, 3, 96)])
def test_korthikanti_activations_per_layer(hidden: int, heads: int, batch: int, length: int) -> None:
    """Korthikanti et al. (2205.05198), equation 2: s·b·h·(34 + 5·a·s/h) bytes a layer, in 16-bit with dropout.

    It leaves out what LayerNorm and the three residual copies of PyTorch's eager modules keep on top: mean and
    reciprocal deviation in fp32 of two norms (16 bytes a token), counted here by themselves.
    """
    formula = length * batch * hidden * 34 + 5 * heads * length**2 * batch
    statistics = 16 * batch * length
    assert saved_per_block(hidden, heads, batch, length) == formula + statistics


def four_billion() -> Report:
    spec, _ = canonical_spec(4 * 10**9)
    return estimate(spec, TrainingSetup(batch=16))


def test_page_four_billion_parameters_at_batch_sixteen() -> None:
    """The documentation page: 4B parameters at batch 16 in mixed precision need about 85 GB.

    PyTorch's trackers measured forward and backward of exactly this shape; the process total adds named overheads.
    """
    report = four_billion()
    assert report.model.parameters.total == 4_047_191_040
    assert report.phases.forward.peak_bytes == 81_638_040_064  # type: ignore[union-attr]
    assert report.phases.backward.peak_bytes == 81_849_786_368  # type: ignore[union-attr]
    assert report.peak.allocated_bytes == pytest.approx(81.85e9, rel=0.01)
    assert report.peak.process_bytes == pytest.approx(85e9, rel=0.02)


def test_page_bytes_per_parameter_in_mixed_precision() -> None:
    """The page: 4 bytes of fp32 weights and 2 of their 16-bit copy, 8 of AdamW states, 4 of gradients."""
    rows = four_billion().components
    assert rows.model_weights.bytes_per_parameter == pytest.approx(6, abs=0.06)  # the embedding is not cast
    assert rows.optimizer_states.bytes_per_parameter == pytest.approx(8, abs=0.001)
    assert rows.gradients.bytes_per_parameter == pytest.approx(4, abs=0.001)


@pytest.mark.parametrize(("precision", "per_parameter"), [("bf16", (2, 4, 2)), ("fp32", (4, 8, 4))])
def test_bytes_per_parameter_of_pure_precisions(precision: str, per_parameter: tuple[int, int, int]) -> None:
    spec, _ = canonical_spec(4 * 10**9)
    rows = estimate(spec, TrainingSetup(precision=precision)).components  # type: ignore[arg-type]
    found = (rows.model_weights, rows.optimizer_states, rows.gradients)
    assert [row.bytes_per_parameter for row in found] == pytest.approx(per_parameter, abs=0.001)


def test_adamw_keeps_two_states_of_the_weights_dtype() -> None:
    weight = Weight((4096, 4096), 4)
    assert sum(OPTIMIZERS["adamw"].states(weight).values()) == 8 * 4096 * 4096
