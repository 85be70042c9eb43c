"""Calls of diffusers' pipelines, run for real: every stage to the byte, or by the tensor that differs."""

import pytest
from support.pipeline_rows import computed, rows

ROWS = dict(rows())

WORKSPACE = "the row's cuBLAS workspace, counted as the larger block that it was given"
KNOWN: dict[str, tuple[int, str]] = {
    "sdxl pipeline a100": (-655360, WORKSPACE),
    "wan14 denoise a100": (-393216, WORKSPACE),
}


@pytest.mark.parametrize("name", ROWS)
def test_row(name: str) -> None:
    case, measured = ROWS[name]["case"], ROWS[name]["rounded"]
    found = computed(case)
    less = KNOWN.get(name, (0, ""))[0]
    assert {phase: nbytes - found[phase] for phase, nbytes in measured.items()} == dict.fromkeys(measured, less)


def test_what_differs_has_a_row() -> None:
    assert KNOWN.keys() <= ROWS.keys()
