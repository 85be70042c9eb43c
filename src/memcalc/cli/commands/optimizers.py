"""`memcalc optimizers`: the table of optimizers."""

from collections.abc import Mapping
from typing import Annotated

from memcalc.cli.output import JSON, print_json, print_table
from memcalc.optim.weight import Weight
from memcalc.render.tables import Column
from memcalc.tables.optimizers import OPTIMIZERS, Optimizer

_SAMPLE = Weight((4096, 4096), 4)
"""The fp32 matrix whose states the table shows."""

_COLUMNS = (
    Column("name", whole=True),
    Column("bytes/param", right=True, whole=True),
    Column("host", right=True, whole=True),
    Column("states of a matrix"),
    Column("implementations, default first", needs=90),
    Column("source", needs=110),
)


def command(json: Annotated[bool, JSON] = False) -> None:
    """List the optimizers that --optimizer knows: their states, and bytes per parameter of fp32 weights."""
    if json:
        print_json([_object(row) for row in OPTIMIZERS.values()])
        return
    rows = []
    for row in OPTIMIZERS.values():
        states, host = row.states(_SAMPLE), row.host(_SAMPLE)
        names = ", ".join([*states, *(f"{name} (host)" for name in host)]) or "none"
        implementations = ", ".join(row.step)
        rows.append((row.name, _per_parameter(states), _per_parameter(host), names, implementations, row.source))
    print_table(_COLUMNS, rows)


def _object(row: Optimizer) -> dict[str, object]:
    states, host = row.states(_SAMPLE), row.host(_SAMPLE)
    share = _SAMPLE.itemsize / _SAMPLE.nbytes
    return {
        "name": row.name,
        "bytes_per_parameter": sum(states.values()) * share,
        "host_bytes_per_parameter": sum(host.values()) * share,
        "states": list(states),
        "host_states": list(host),
        "implementations": list(row.step),
        "source": row.source,
    }


def _per_parameter(states: Mapping[str, int]) -> str:
    return f"{sum(states.values()) * _SAMPLE.itemsize / _SAMPLE.nbytes:.2g}"
