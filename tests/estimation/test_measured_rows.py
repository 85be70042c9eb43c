"""Every measured row, to the byte. `KNOWN` names the rows that differ, with the tensor that makes the difference."""

from typing import Any

import pytest
from support.known_differences import KNOWN
from support.measured_rows import answer, rows

ROWS = dict(rows())


@pytest.mark.parametrize("name", ROWS)
def test_row(name: str) -> None:
    row = ROWS[name]
    said, measured = answer(row["case"]), row["measured"]
    assert said == shifted(measured, KNOWN.get(name, {}))


def shifted(measured: dict[str, Any], known: dict[str, int]) -> dict[str, Any]:
    """A measured row with the known differences of the instrument taken into account."""
    out = dict(measured)
    for key, difference in known.items():
        if key in ("forward", "backward", "step"):
            out["phase_peak"] = {**out["phase_peak"], key: out["phase_peak"][key] + difference}
        else:
            out[key] += difference
    return out
