"""Published measurements: docs/accuracy.md says what memcalc computes now, and the medians hold."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent


def _script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("accuracy", ROOT / "benchmarks" / "accuracy.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["accuracy"] = module
    spec.loader.exec_module(module)
    return module


accuracy = _script()


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
