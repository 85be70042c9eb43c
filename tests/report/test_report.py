"""The JSON contract: exactly these keys, described by the schema that pydantic writes."""

import json
import re
from importlib.metadata import version

import pytest
from support.reports import inference_report, training_report

from memcalc import InferenceSetup, TrainingSetup, canonical_spec, estimate, find_gpu
from memcalc.render import json_report
from memcalc.report.schema import Report

ROWS = ["model_weights", "optimizer_states", "gradients", "activations", "temporary_tensors", "other_overhead"]


def test_the_keys_of_the_contract() -> None:
    found = json.loads(json_report.render(training_report()))
    assert list(found) == [
        "schema_version",
        "memcalc_version",
        "numbers_stand_for",
        "model",
        "setup",
        "assumptions",
        "components",
        "saved_for_backward_bytes",
        "phases",
        "peak",
        "kv_cache_bytes",
        "gpu",
        "serving",
        "remedies",
        "mixed_lengths",
        "cluster",
        "ranks",
    ]
    assert (found["schema_version"], found["memcalc_version"]) == (2, version("gpu-memcalc"))
    assert list(found["numbers_stand_for"]) == ["torch", "transformers"]
    assert all(list(assumption) == ["code", "text"] for assumption in found["assumptions"])
    assert list(found["model"]) == ["name", "family", "parameters"]
    assert list(found["model"]["parameters"]) == ["total", "trainable", "embedding", "active"]
    assert list(found["components"]) == ROWS
    for row in found["components"].values():
        assert list(row) == ["peak_bytes", "max_bytes", "bytes_per_parameter", "parts"]
        assert row["peak_bytes"] == sum(part["bytes"] for part in row["parts"])
        assert all(list(part) == ["name", "bytes"] for part in row["parts"])
    assert {name: list(phase) for name, phase in found["phases"].items()} == {
        "forward": ["peak_bytes"],
        "backward": ["peak_bytes"],
        "step": ["peak_bytes"],
    }
    assert list(found["peak"]) == ["phase", "moment", "allocated_bytes", "reserved_bytes", "process_bytes"]
    assert found["peak"]["process_bytes"] == sum(row["peak_bytes"] for row in found["components"].values())
    assert list(found["gpu"]) == ["name", "total_bytes", "usable_bytes", "fits", "free_bytes", "needed_bytes"]
    assert found["kv_cache_bytes"] is None


def test_the_keys_of_inference() -> None:
    found = json.loads(json_report.render(inference_report()))
    assert list(found["phases"]) == ["load", "prefill", "decode"]
    assert found["phases"]["load"] is None
    assert found["saved_for_backward_bytes"] is None
    assert isinstance(found["kv_cache_bytes"], int)
    assert found["gpu"] is None


def _on_several_gpus() -> Report:
    return estimate(canonical_spec(10**9)[0], TrainingSetup(gpus=4, pipeline_parallel_size=2, parallel="fsdp2"))


@pytest.mark.parametrize("report", [training_report(), inference_report(), _on_several_gpus()])
def test_pydantic_reads_back_what_was_written(report: Report) -> None:
    text = json_report.render(report)
    assert type(report).model_validate_json(text) == report
    assert Report.model_validate_json(text).model_dump() == report.model_dump()


def test_the_schema_describes_every_field() -> None:
    schema = Report.model_json_schema(mode="serialization")
    for definition in (schema, *schema["$defs"].values()):
        assert definition["additionalProperties"] is False
        assert definition["description"]
        assert sorted(definition["required"]) == sorted(definition["properties"])
        for name, field in definition["properties"].items():
            assert field["description"], name
    assert schema["properties"]["schema_version"]["const"] == 2
    assert list(schema["$defs"]["Components"]["properties"]) == ROWS


JOBS: list[tuple[TrainingSetup | InferenceSetup, str | None]] = [
    (TrainingSetup(), "H100"),
    (TrainingSetup(objective="dpo", lora_rank=4, cuda_context="1GiB"), None),
    (TrainingSetup(objective="grpo", num_generations=2), None),
    (InferenceSetup(engine="vllm", kv_dtype="fp8"), "24GB"),
    (InferenceSetup(quantization="nf4", tensor_parallel_size=2), None),
    (TrainingSetup(gpus=4, parallel="zero3", cpu_offload="optimizer"), "H100"),
    (TrainingSetup(gpus=4, pipeline_parallel_size=2, parallel="fsdp2", lora_rank=8), None),
]


@pytest.mark.parametrize(("setup", "gpu"), JOBS, ids=str)
def test_the_schema_describes_the_setup_of_a_report(setup: TrainingSetup | InferenceSetup, gpu: str | None) -> None:
    report = estimate(canonical_spec(10**9)[0], setup, find_gpu(gpu) if gpu else None)
    modes = Report.model_json_schema(mode="serialization")["properties"]["setup"]["anyOf"]
    (described,) = (mode for mode in modes if mode["properties"]["mode"].get("const") == report.setup["mode"])
    assert set(described["required"]) <= set(report.setup) <= set(described["properties"])
    assert all(field["description"] for field in described["properties"].values())


@pytest.mark.parametrize(("setup", "gpu"), JOBS, ids=str)
def test_what_is_assumed_has_a_code_and_a_text(setup: TrainingSetup | InferenceSetup, gpu: str | None) -> None:
    report = estimate(canonical_spec(10**9)[0], setup, find_gpu(gpu) if gpu else None)
    assert "sequence_length" in {assumption.code for assumption in report.assumptions}
    for assumption in report.assumptions:
        assert re.fullmatch(r"[a-z][a-z0-9_]+", assumption.code)
        assert " " in assumption.text


def test_fits_and_free_are_what_they_say() -> None:
    """An engine is told to fill a share of the GPU, and only that is usable."""
    gpu = find_gpu("RTX 4090")
    report = estimate(canonical_spec(8 * 10**9)[0], InferenceSetup(engine="sglang", batch=24, seq_len=2048), gpu)
    assert report.gpu is not None
    assert report.gpu.usable_bytes == int(0.847 * gpu.usable_bytes) < gpu.total_bytes == report.gpu.total_bytes
    assert report.gpu.free_bytes == report.gpu.usable_bytes - report.peak.process_bytes
    assert report.gpu.fits == (report.gpu.free_bytes >= 0)
