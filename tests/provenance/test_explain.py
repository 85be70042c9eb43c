"""What explain says of a moment: sizes that sum to the box, formulas that hold, the tensors that PyTorch saves."""

import json
from collections import Counter
from math import prod
from typing import Any

import pytest
from support.measured_rows import inference_setup, rows, training_setup
from support.paths import DATA, SOURCE
from support.shapes import decoder

from memcalc.errors import UsageError
from memcalc.estimation.estimate import estimate
from memcalc.models.llama_shape import canonical_spec
from memcalc.models.spec import ModelSpec
from memcalc.provenance.explain import explain
from memcalc.provenance.explanation import Explanation, TensorEntry
from memcalc.setup.setup import InferenceSetup, TrainingSetup
from memcalc.tables.dtypes import BF16, BOOL, FP16, FP32, INT32, INT64

ITEMSIZE = {dtype.name: dtype.itemsize for dtype in (BF16, BOOL, FP16, FP32, INT32, INT64)}
SMALL = ModelSpec.from_config(decoder(64, 4, 4, 2, 128, 320), "small")


def evaluated(entry: TensorEntry) -> int:
    """The formula's bytes, as anyone with the JSON can compute them."""
    known: dict[str, Any] = {"round_up": lambda number, multiple: -(-number // multiple) * multiple, "int": int}
    return int(eval(entry.formula, {"__builtins__": {}}, known | dict(entry.numbers))) * entry.count


def check(found: Explanation) -> None:
    """What holds for every explanation."""
    assert sum(entry.bytes for entry in found.tensors) == found.total_bytes
    for entry in found.tensors:
        assert evaluated(entry) == entry.bytes, entry
        file, _, line = entry.source.partition(":")
        assert int(line) <= len((SOURCE / file).read_text().splitlines())


def spec_and_setup(case: dict[str, Any]) -> tuple[ModelSpec, TrainingSetup | InferenceSetup, ModelSpec | None]:
    spec = ModelSpec.from_config(case["config"])
    teacher = ModelSpec.from_config(case["teacher"]) if "teacher" in case else None
    return spec, inference_setup(case) if case.get("mode") == "infer" else training_setup(case), teacher


FAMILIES = list({name.partition(":")[0]: row["case"] for name, row in rows()}.items())


@pytest.mark.parametrize(("name", "case"), FAMILIES[::19], ids=lambda item: str(item)[:20])
def test_sizes_sum_to_the_box_and_formulas_hold(name: str, case: dict[str, Any]) -> None:
    spec, setup, teacher = spec_and_setup(case)
    report = estimate(spec, setup, teacher=teacher)
    found = explain(spec, setup, teacher=teacher)
    check(found)
    assert dict(found.rows) == {row: component.peak_bytes for row, component in report.components.rows()}
    assert found.total_bytes == report.peak.process_bytes
    assert (found.phase, found.moment) == (report.peak.phase, report.peak.moment)


@pytest.mark.parametrize(
    "options",
    [
        {"activation_checkpointing": "full"},
        {"activation_checkpointing": "full", "checkpoint_reentrant": True},
        {"activation_offloading": True},
        {"precision": "mixed-bf16", "grad_accum": 2},
        {"lora_rank": 4, "quantization": "nf4"},
        {"optimizer": "adamw-8bit"},
        {"optimizer_in_backward": True},
        {"objective": "dpo"},
        {"parallel": "fsdp2", "gpus": 4},
        {"parallel": "zero3", "gpus": 4},
    ],
    ids=str,
)
def test_options_and_phases(options: dict[str, Any]) -> None:
    setup = TrainingSetup(batch=2, seq_len=48, **options)
    report = estimate(SMALL, setup)
    outside = report.peak.process_bytes - max(phase.peak_bytes for _, phase in report.phases)
    for phase, peak in report.phases:
        found = explain(SMALL, setup, phase=phase)
        check(found)
        assert found.total_bytes == peak.peak_bytes + outside


@pytest.mark.parametrize("options", [{}, {"engine": "vllm"}, {"num_beams": 3}, {"kv_dtype": "int4"}], ids=str)
def test_inference(options: dict[str, Any]) -> None:
    setup = InferenceSetup(batch=2, seq_len=48, **options)
    found = explain(SMALL, setup)
    check(found)
    assert found.total_bytes == estimate(SMALL, setup).peak.process_bytes


@pytest.mark.parametrize("row", (DATA / "saved_sets.jsonl").read_text().splitlines(), ids=range(12))
def test_the_largest_saved_tensors_are_those_that_pytorch_saves(row: str) -> None:
    """Storages by bytes and dtype, from 4 KiB on; the inputs of the step are not saved by an operation."""
    found = json.loads(row)
    spec, setup, _ = spec_and_setup(found["case"])
    mine, torchs = Counter[tuple[int, str]](), Counter[tuple[int, str]]()
    for entry in explain(spec, setup, at="end of forward").tensors:
        saved = entry.alive_because.startswith(("saved by", "input of a checkpointed"))
        if saved and entry.made_in == "forward" and entry.shape is not None and entry.dtype is not None:
            mine[prod(entry.shape) * ITEMSIZE[entry.dtype], entry.dtype] += entry.count
    for _, dtype, nbytes, count in found["measured"]["saved_set"]:
        torchs[nbytes, dtype] += count
    for sizes in (mine, torchs):
        for key in [key for key in sizes if key[0] < 4096 or key[1] == "int64"]:
            del sizes[key]
    assert mine == torchs


def test_a_tensor_is_told_of_whole() -> None:
    setup = TrainingSetup(batch=2, seq_len=48, precision="bf16")
    (logits,) = [
        entry
        for entry in explain(SMALL, setup, at="end of forward").tensors
        if entry.shape == (96, 320) and entry.dtype == "float32"
    ]
    assert logits.formula == "batch * seq_len * vocab_size * 4"
    assert logits.numbers == {"batch": 2, "seq_len": 48, "vocab_size": 320}
    assert logits.alive_because == "saved by log_softmax of cross_entropy (head and loss) for backward"
    assert logits.until == "after the backward of log_softmax of cross_entropy"
    gates = [entry for entry in explain(SMALL, setup).tensors if entry.module.endswith("mlp.gate_proj")]
    assert gates[0].module == "model.layers.{0..3}.mlp.gate_proj"
    assert gates[0].count == 4
    assert gates[0].alive_because == "saved by silu of model.layers.{n}.mlp for backward"
    assert gates[0].source.startswith("nn/layers/linear.py:")


def test_a_length_that_is_a_size_is_told_apart() -> None:
    """64 tokens, 64 wide, 128 = 2 x 64 = the MLP: what changes with the batch or the length has them in its formula."""
    setup = TrainingSetup(batch=2, seq_len=64, precision="bf16", optimizer_in_backward=True)
    formulas = {
        (entry.module.rpartition(".")[2], entry.operation, entry.formula)
        for entry in explain(SMALL, setup, at="end of forward").tensors
    }
    assert ("gate_proj", "linear", "batch * seq_len * intermediate_size * 2") in formulas
    assert ("input_layernorm", "mul", "batch * seq_len * hidden_size * 2") in formulas
    alone = explain(SMALL, TrainingSetup(batch=1, seq_len=64), at="backward of block 1").tensors
    gradients = [entry for entry in alone if entry.row == "gradients" and entry.module.endswith("down_proj")]
    assert {entry.formula for entry in gradients} == {"hidden_size * intermediate_size * 4"}


def test_weights_states_and_gradients_are_told_one_by_one() -> None:
    found = explain(SMALL, TrainingSetup(batch=1, seq_len=8), phase="step")
    of_gate = [entry for entry in found.tensors if entry.module == "model.layers.{0..3}.mlp.gate_proj.weight"]
    assert sorted(entry.operation for entry in of_gate) == [
        "adamw step (foreach)",
        "gradient of a parameter",
        "momentum",
        "parameter",
        "variance",
    ]
    assert {entry.formula for entry in of_gate} == {"intermediate_size * hidden_size * 4"}


def test_moments() -> None:
    setup = TrainingSetup(batch=2, seq_len=48)
    found = explain(SMALL, setup, at="backward of block 3")
    assert found.moment == "backward of block 3 of 4"
    assert not found.is_peak
    made_later = [entry for entry in found.tensors if "layers.{0..2}" in entry.module]
    assert made_later, "blocks 1 to 3 still hold what they saved"
    assert explain(SMALL, setup, at="optimizer step").phase == "step"
    with pytest.raises(UsageError, match="did you mean 'backward of block 3'"):
        explain(SMALL, setup, at="backward of blok 3")
    with pytest.raises(UsageError, match="--phase cannot be 'prefill'"):
        explain(SMALL, setup, phase="prefill")


def test_a_local_variable_holds_what_is_not_saved() -> None:
    spec, _ = canonical_spec(10**8)
    found = explain(spec, InferenceSetup(seq_len=64), phase="prefill")
    assert any(entry.alive_because.startswith("held by the local variable") for entry in found.tensors)


def test_an_estimate_is_the_same_before_and_after() -> None:
    setup = TrainingSetup(batch=2, seq_len=40)
    before = estimate(SMALL, setup)
    explain(SMALL, setup)
    assert estimate(SMALL, setup) == before
