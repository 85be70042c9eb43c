"""Remedies: their savings are differences of two estimates, and what is said to fit fits."""

import pytest

from memcalc import TrainingSetup, canonical_spec, estimate, find_gpu
from memcalc.decide.remedies import REMEDIES, remedies
from memcalc.decide.what_fits import advise

CASES = [
    ("1B", TrainingSetup(batch=8, seq_len=2048), "RTX-4090"),
    ("8B", TrainingSetup(batch=4, seq_len=2048), "RTX-4090"),
    ("8B", TrainingSetup(seq_len=4096, lora_rank=8, lora_targets="all-linear", precision="bf16"), "RTX-4090"),
    ("70B", TrainingSetup(seq_len=1024), "H100-80GB"),
    ("8B", TrainingSetup(seq_len=1024, gpus=4), "A100-40GB"),
    ("8B", TrainingSetup(seq_len=1024, gpus=4, parallel="zero2"), "RTX-4090"),
]
SIZES = {"1B": 10**9, "8B": 8 * 10**9, "70B": 70 * 10**9}


@pytest.mark.parametrize(("size", "setup", "name"), CASES)
def test_savings_are_differences_and_the_stack_fits(size: str, setup: TrainingSetup, name: str) -> None:
    spec, gpu = canonical_spec(SIZES[size])[0], find_gpu(name)
    before = estimate(spec, setup, gpu).peak.process_bytes
    advice = advise(spec, setup, gpu)
    assert advice.offers
    for offer in advice.offers:
        applied = offer.remedy.applied(setup)
        assert applied is not None
        report = estimate(spec, applied, gpu)
        assert report.gpu is not None
        assert offer.saved_bytes == before - report.peak.process_bytes > 0
        assert offer.fits == report.gpu.fits
    assert advice.stack
    together = setup
    for remedy in advice.stack:
        changed = remedy.applied(together)
        assert changed is not None
        together = changed
    report = estimate(spec, together, gpu)
    assert report.gpu is not None
    assert report.gpu.fits
    assert report.peak.process_bytes == advice.process_bytes


def test_the_stack_has_nothing_to_spare() -> None:
    spec, gpu, setup = canonical_spec(8 * 10**9)[0], find_gpu("RTX-4090"), TrainingSetup(batch=4, seq_len=2048)
    stack = advise(spec, setup, gpu).stack
    for left_out in stack[:-1]:
        fewer = setup
        for remedy in stack:
            if remedy is not left_out:
                changed = remedy.applied(fewer)
                assert changed is not None
                fewer = changed
        report = estimate(spec, fewer, gpu)
        assert report.gpu is not None
        assert not report.gpu.fits


def test_nothing_helps_a_model_that_is_too_large() -> None:
    advice = advise(canonical_spec(10**12)[0], TrainingSetup(), find_gpu("RTX-4090"))
    assert advice.offers
    assert not advice.stack


def test_a_setup_is_not_offered_what_it_has() -> None:
    setup = TrainingSetup(activation_checkpointing="full", optimizer="adamw-8bit", precision="bf16", lora_rank=4)
    names = {remedy.name for remedy in remedies(setup) if remedy.applied(setup) is not None}
    assert names.isdisjoint({"activation checkpointing", "8-bit optimizer", "weights in 16 bits", "LoRA"})
    assert "QLoRA" in names


def test_remedies_that_contradict_the_setup_are_left_out() -> None:
    setup = TrainingSetup(objective="dpo", batch=2)
    assert all(remedy.name != "fused loss" or remedy.applied(setup) is None for remedy in REMEDIES)


def test_options_are_spelled_as_on_the_command_line() -> None:
    found = {remedy.name: remedy.as_options() for remedy in REMEDIES}
    assert found["activation offloading"] == "--activation-offloading"
    assert found["8-bit optimizer"] == "--optimizer adamw-8bit"


def test_ranks_that_hold_the_same_are_offered_to_share() -> None:
    spec, gpu = canonical_spec(8 * 10**9)[0], find_gpu("A100-80GB")
    names = {offer.remedy.name for offer in advise(spec, TrainingSetup(gpus=8, seq_len=2048), gpu).offers}
    assert {"ZeRO 1", "FSDP2"} <= names
    alone = {offer.remedy.name for offer in advise(spec, TrainingSetup(seq_len=2048), gpu).offers}
    assert names.isdisjoint({"ZeRO 3", "optimizer offloading"})
    assert alone.isdisjoint({"ZeRO 1", "FSDP2", "ZeRO 3"})


def test_deepspeed_goes_on_with_deepspeed() -> None:
    setup = TrainingSetup(gpus=4, parallel="zero2", seq_len=1024)
    stack = advise(canonical_spec(8 * 10**9)[0], setup, find_gpu("RTX-4090")).stack
    assert {remedy.options.get("parallel") for remedy in stack} <= {None, "zero3"}


def test_remedies_are_in_the_report_as_in_the_advice() -> None:
    spec, gpu, setup = canonical_spec(8 * 10**9)[0], find_gpu("RTX-4090"), TrainingSetup(batch=4, seq_len=2048)
    advice = advise(spec, setup, gpu)
    found = advice.reported()
    assert [offer.saved_bytes for offer in found.alone] == [offer.saved_bytes for offer in advice.offers]
    assert found.together is not None
    together = TrainingSetup(**{**setup.model_dump(exclude_unset=True), **found.together})
    assert estimate(spec, together, gpu).peak.process_bytes == found.process_bytes == advice.process_bytes
