"""Exact parameter counts: total, and active for mixtures of experts.

Each line of `counts/*.jsonl` holds a shape and the count of the model that Transformers builds from it (meta device).
"""

import json
from typing import Any

import pytest
from support.paths import DATA

from memcalc.models.build import build
from memcalc.models.spec import ModelSpec
from memcalc.nn.parameter_counts import active_parameters

LINES = {
    f"{path.stem}:{number}:{case['name']}": case
    for path in sorted((DATA / "counts").glob("*.jsonl"))
    for number, case in enumerate(map(json.loads, path.read_text().splitlines()))
}


@pytest.mark.parametrize("name", LINES)
def test_count(name: str) -> None:
    case: dict[str, Any] = LINES[name]
    network = build(ModelSpec.from_config(case["config"], case["name"]))
    assert sum(parameter.numel * parameter.copies for _, parameter in network.parameters()) == case["params"]
    if case.get("active") is not None:
        assert active_parameters(network) == case["active"]
