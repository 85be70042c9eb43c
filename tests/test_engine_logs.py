"""docs/engine-logs.md says what memcalc computes now."""

import sys

from support.paths import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

import engine_logs


def test_page_says_what_is_computed_now() -> None:
    assert engine_logs.PAGE.read_text() == "\n".join(engine_logs.lines()) + "\n"
