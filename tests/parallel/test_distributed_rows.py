"""Every phase of every measured rank, to the byte."""

import json

import pytest
from support.distributed_rows import answer
from support.paths import DATA

FOLDER = DATA / "measured" / "distributed"
ROWS = {
    f"{path.stem}:{number}": json.loads(line)
    for path in sorted(FOLDER.glob("*.jsonl"))
    for number, line in enumerate(path.read_text().splitlines())
}

AXES_TO_COME = ("tensor", "expert")


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if not row["case"].keys() & set(AXES_TO_COME)])
def test_a_rank_peaks_where_it_was_measured(name: str) -> None:
    row = ROWS[name]
    assert answer(row["case"]) == row["measured"]["phase_peak"]
