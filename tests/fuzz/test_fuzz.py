"""A few seconds of mutated inputs of every kind: a sentence or an answer that holds together, within the budgets."""

import os

import pytest
from support.fuzz_inputs import KINDS
from support.fuzzing import fuzz

SECONDS = float(os.environ.get("MEMCALC_FUZZ_SECONDS", "3.5"))
SEED = int(os.environ.get("MEMCALC_FUZZ_SEED", "0"))


@pytest.mark.parametrize("kind", KINDS)
def test_mutated_inputs(kind: str) -> None:
    found = fuzz(kind, SECONDS, SEED)
    assert found.faults == [], str(found)
    assert found.inputs > 5
