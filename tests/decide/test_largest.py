"""The largest job that fits: the estimate itself says that one more does not."""

from typing import Any

import pytest

from memcalc import InferenceSetup, TrainingSetup, canonical_spec, estimate, find_gpu
from memcalc.decide.largest import fewest_gpus, largest, smallest_gpu
from memcalc.errors import MemcalcError
from memcalc.models.spec import ModelSpec
from memcalc.tables.gpus import GPUS

SPEC = canonical_spec(10**9)[0]
LORA: dict[str, Any] = {"lora_rank": 8, "lora_targets": "all-linear", "precision": "bf16", "seq_len": 512}


def fits(setup: Any, gpu: Any, spec: ModelSpec = SPEC) -> bool:
    report = estimate(spec, setup, gpu)
    assert report.gpu is not None
    return bool(report.gpu.fits)


def too_large(setup: Any, gpu: Any) -> bool:
    """Whether a job does not fit, or is more than the model can have (no matrix has that rank)."""
    try:
        return not fits(setup, gpu)
    except MemcalcError:
        return True


@pytest.mark.parametrize(
    ("setup", "field"),
    [
        (TrainingSetup(seq_len=1024, precision="bf16"), "batch"),
        (TrainingSetup(precision="bf16"), "seq_len"),
        (TrainingSetup(**LORA), "lora_rank"),
        (InferenceSetup(seq_len=4096), "batch"),
        (InferenceSetup(), "seq_len"),
    ],
)
def test_one_more_does_not_fit(setup: Any, field: str) -> None:
    gpu = find_gpu("RTX-3060")
    found = largest(SPEC, setup, gpu, field)
    assert found.value
    assert fits(setup.model_copy(update={field: found.value}), gpu)
    assert estimate(SPEC, setup.model_copy(update={field: found.value}), gpu).peak.process_bytes == found.process_bytes
    assert too_large(setup.model_copy(update={field: found.value + 1}), gpu)


def test_none_fits() -> None:
    found = largest(SPEC, TrainingSetup(), find_gpu("4GB"), "batch")
    assert (found.value, found.process_bytes) == (0, 0)


def test_the_smallest_gpu_is_the_first_that_fits() -> None:
    setup = TrainingSetup(seq_len=512)
    found = smallest_gpu(SPEC, setup)
    assert found is not None
    assert fits(setup, found)
    assert not any(fits(setup, gpu) for gpu in GPUS if gpu.usable_bytes < found.usable_bytes)


def test_no_gpu_is_large_enough() -> None:
    assert smallest_gpu(canonical_spec(10**12)[0], TrainingSetup()) is None


@pytest.mark.parametrize(
    "setup",
    [
        TrainingSetup(seq_len=512),
        TrainingSetup(seq_len=512, parallel="zero3", zero_auto=True),
        TrainingSetup(seq_len=512, tensor_parallel_size=2, parallel="fsdp2"),
    ],
    ids=lambda setup: f"{setup.parallel}, {setup.tensor_parallel_size}",
)
def test_one_gpu_less_does_not_fit(setup: TrainingSetup) -> None:
    spec, gpu = canonical_spec(8 * 10**9)[0], find_gpu("A100-40GB")
    number = fewest_gpus(spec, setup, gpu)
    assert number is not None
    step, engine = setup.tensor_parallel_size, setup.parallel or "fsdp2"
    assert fits(setup.model_copy(update={"parallel": engine, "gpus": number}), gpu, spec)
    assert not fits(setup.model_copy(update={"parallel": engine, "gpus": number - step}), gpu, spec)


def test_no_number_of_gpus_helps_where_activations_are_too_large() -> None:
    assert fewest_gpus(SPEC, TrainingSetup(batch=64, seq_len=4096), find_gpu("RTX-4090")) is None


def test_no_number_of_gpus_helps_an_option_for_one() -> None:
    setup = TrainingSetup(batch=64, seq_len=4096, train_only="lm_head", frozen_dtype="bf16")
    assert fewest_gpus(SPEC, setup, find_gpu("RTX-4090")) is None
