"""The JSON contract: exactly these keys, described by the schema that pydantic writes."""

import json

import pytest
from pydantic import TypeAdapter
from support.reports import inference_report, training_report

from memcalc.render import json_report
from memcalc.report.schema import Report, json_schema

ROWS = ["model_weights", "optimizer_states", "gradients", "activations", "temporary_tensors", "other_overhead"]


def test_the_keys_of_the_contract() -> None:
    found = json.loads(json_report.render(training_report()))
    assert list(found) == [
        "schema_version",
        "model",
        "setup",
        "assumptions",
        "components",
        "saved_for_backward_bytes",
        "phases",
        "peak",
        "kv_cache_bytes",
        "gpu",
    ]
    assert found["schema_version"] == 1
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
    assert list(found["gpu"]) == ["name", "total_bytes", "usable_bytes", "fits", "free_bytes"]
    assert found["kv_cache_bytes"] is None


def test_the_keys_of_inference() -> None:
    found = json.loads(json_report.render(inference_report()))
    assert list(found["phases"]) == ["prefill", "decode"]
    assert found["saved_for_backward_bytes"] is None
    assert isinstance(found["kv_cache_bytes"], int)
    assert found["gpu"] is None


@pytest.mark.parametrize("report", [training_report(), inference_report()])
def test_pydantic_reads_back_what_was_written(report: Report) -> None:
    assert TypeAdapter(Report).validate_json(json_report.render(report)) == report


def test_the_schema_describes_every_field() -> None:
    schema = json_schema()
    for definition in (schema, *schema["$defs"].values()):
        assert definition["additionalProperties"] is False
        assert definition["description"]
        assert sorted(definition["required"]) == sorted(set(definition["properties"]) - {"serving"})
        for name, field in definition["properties"].items():
            assert field["description"], name
    assert schema["properties"]["schema_version"]["const"] == 1
    assert list(schema["$defs"]["Components"]["properties"]) == ROWS
