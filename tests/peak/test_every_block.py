"""One block of a kind answers for the others exactly: phases, rows, parts, saved bytes, host bytes and caches."""

import pytest
from support.every_block import deep_jobs, differences, measured_jobs

PARTS = 12


@pytest.mark.parametrize("part", range(PARTS))
def test_measured_cases(part: int) -> None:
    found = {name: differences(*job) for name, job in list(measured_jobs())[part::PARTS]}
    assert not {name: numbers for name, numbers in found.items() if numbers}


@pytest.mark.parametrize("part", range(PARTS))
def test_deeper_models_with_all_options(part: int) -> None:
    """A sample of them here; `benchmarks/every_block.py` tries all."""
    found = {name: differences(*job) for name, job in list(deep_jobs(every=31))[part::PARTS]}
    assert not {name: numbers for name, numbers in found.items() if numbers}
    assert any(numbers is not None for numbers in found.values())
