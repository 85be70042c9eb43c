"""docs/loops.md says what memcalc computes now."""

import json
import re

import pytest
from support.cli_runs import run
from support.paths import ROOT

TABLE = re.findall(
    r"^\| `(.*?)` \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", (ROOT / "docs" / "loops.md").read_text(), re.M
)


@pytest.mark.parametrize(("options", "forward", "backward", "step"), TABLE)
def test_row(options: str, forward: str, backward: str, step: str) -> None:
    more = [] if options == "(plain)" else options.split()
    found = json.loads(run("estimate", "--params", "1B", "--batch", "4", "--seq-len", "2048", *more, "--json").stdout)
    peaks = [found["phases"][phase]["peak_bytes"] / 2**30 for phase in ("forward", "backward", "step")]
    assert [f"{peak:.2f}" for peak in peaks] == [forward, backward, step]


def test_the_table_is_read() -> None:
    assert len(TABLE) == 12
