"""`memcalc optimizers`: the table of optimizers."""

from memcalc.cli.output import print_table
from memcalc.tables.optimizers import OPTIMIZERS, Weight

_SAMPLE = Weight((4096, 4096), 4)
"""The fp32 matrix whose states the table shows."""


def command() -> None:
    """List the optimizers that --optimizer knows: their states, and the bytes they take per fp32 parameter."""
    rows = []
    for row in OPTIMIZERS.values():
        states = row.states(_SAMPLE)
        ratio = sum(states.values()) * _SAMPLE.itemsize / _SAMPLE.nbytes
        rows.append((row.name, f"{ratio:.2g}", ", ".join(states) or "none", ", ".join(row.step), row.source))
    print_table(("name", "bytes/param", "states", "implementations", "source"), rows, right=(1,))
