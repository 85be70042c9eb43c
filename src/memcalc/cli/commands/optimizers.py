"""`memcalc optimizers`: the table of optimizers."""

from collections.abc import Mapping
from typing import Annotated

from memcalc.cli.output import JSON, print_json_or_table
from memcalc.optim.weight import Weight
from memcalc.tables.optimizers import OPTIMIZERS

_SAMPLE = Weight((4096, 4096), 4)
"""The fp32 matrix whose states the table shows."""

_ELEMENTS = 4096 * 4096


def command(*, as_json: Annotated[bool, JSON] = False) -> None:
    """List the optimizers that --optimizer knows: their states, and bytes per parameter of fp32 weights."""
    rows, values = [], []
    for row in OPTIMIZERS.values():
        states, host = row.states(_SAMPLE), row.host(_SAMPLE)
        names = ", ".join([*states, *(f"{name} (host)" for name in host)]) or "none"
        implementations = ", ".join(row.step)
        rows.append((row.name, _per_parameter(states), _per_parameter(host), names, implementations, row.source))
        values.append(
            {
                "name": row.name,
                "bytes_per_parameter": sum(states.values()) / _ELEMENTS,
                "host_bytes_per_parameter": sum(host.values()) / _ELEMENTS,
                "states": [*states],
                "host_states": [*host],
                "implementations": [*row.step],
                "source": row.source,
            }
        )
    heads = ("name", "bytes/param", "on the host", "states of a matrix", "implementations, default first", "source")
    print_json_or_table(as_json, heads, rows, (1, 2), values)


def _per_parameter(states: Mapping[str, int]) -> str:
    return f"{sum(states.values()) * _SAMPLE.itemsize / _SAMPLE.nbytes:.2g}"
