"""Published measurements: docs/accuracy.md says what memcalc computes now, and the medians hold.

One process runs all of it, so that every row is computed once.
"""

import importlib.util
import json
import sys
from types import ModuleType

import pytest
from support.paths import ROOT


def _script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("accuracy", ROOT / "benchmarks" / "accuracy.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["accuracy"] = module
    sys.path.insert(0, str(ROOT / "benchmarks"))  # where it imports its neighbour from, as when it is run
    spec.loader.exec_module(module)
    return module


accuracy = _script()

pytestmark = pytest.mark.xdist_group("accuracy")


@pytest.fixture(scope="module", name="results")
def _results() -> list[object]:
    return list(accuracy.compare())


def test_page_says_what_is_computed_now(results: list[object]) -> None:
    written = accuracy.PAGE.read_text()
    assert written == accuracy.document(results), "docs/accuracy.md is old: run python benchmarks/accuracy.py"


@pytest.mark.parametrize("kind", accuracy.HELD)
def test_median(results: list[object], kind: str) -> None:
    members = [result for result in results if result.kind == kind]  # type: ignore[attr-defined]
    assert accuracy.median_error(members) <= accuracy.GOALS[kind]


@pytest.mark.parametrize("kind", accuracy.HELD_AS_IT_RAN)
def test_median_as_it_ran(results: list[object], kind: str) -> None:
    members = [result for result in results if kind in (result.kind, result.job)]  # type: ignore[attr-defined]
    assert accuracy.median_error(members, as_it_ran=True) <= accuracy.GOALS[kind]


@pytest.mark.parametrize(
    ("group", "worst"),
    [
        ("LitGPT, LoRA", 0.003),
        ("LitGPT, QLoRA", 0.032),
        ("LitGPT, generation", 0.008),
        ("Transformers' documentation", 0.045),
    ],
)
def test_what_was_kept_then_explains_the_distance(results: list[object], group: str, worst: float) -> None:
    """With the parts of their time: the adapters and losses of LitGPT, old 4-bit layers, an old softmax."""
    members = [result for result in results if result.row["group"] == group and "ran" in result.row]  # type: ignore[attr-defined]
    assert max(abs(member.error_as_it_ran) for member in members) <= worst  # type: ignore[attr-defined]


def test_today_s_parts_come_back() -> None:
    row = next(json.loads(line) for line in (accuracy.PUBLISHED / "transformers.jsonl").read_text().splitlines())
    config = json.loads((accuracy.PUBLISHED / "models.json").read_text())[row["model"]]
    before = accuracy._counted(row, config, row["options"])
    with accuracy.as_it_ran(row["ran"]["parts"]):
        assert accuracy._counted(row, config, row["options"]) > before
    assert accuracy._counted(row, config, row["options"]) == before


def test_full_training_on_a_real_gpu(results: list[object]) -> None:
    members = [result for result in results if result.row["group"] == "RTX A6000"]  # type: ignore[attr-defined]
    assert len(members) == 10
    assert accuracy.median_error(members) <= 0.001


def test_a_far_row_says_why(results: list[object]) -> None:
    far = [result for result in results if abs(result.error) > accuracy.FAR]  # type: ignore[attr-defined]
    assert [result.row["id"] for result in far if not result.row["cause"]] == []  # type: ignore[attr-defined]


def test_every_row_is_compared_or_left_out_once(results: list[object]) -> None:
    left_out = [row["id"] for row in json.loads((accuracy.PUBLISHED / "left_out.json").read_text())]
    names = [result.row["id"] for result in results] + left_out  # type: ignore[attr-defined]
    assert len(names) == len(set(names))
    assert all(row["reason"] for row in json.loads((accuracy.PUBLISHED / "left_out.json").read_text()))
