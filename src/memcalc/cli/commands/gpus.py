"""`memcalc gpus`: the table of GPUs."""

from typing import Annotated

from memcalc.cli.output import JSON, print_json, print_table
from memcalc.render.tables import Column
from memcalc.tables.gpus import GPUS
from memcalc.units import format_bytes

_COLUMNS = (
    Column("name", whole=True),
    Column("board", right=True, whole=True),
    Column("usable", right=True, whole=True),
    Column("in GB", right=True, whole=True, needs=70),
    Column("architecture"),
)


def command(json: Annotated[bool, JSON] = False) -> None:
    """List the GPUs that --gpu knows: memory as the driver reports it, and what CUDA reports, which a process gets."""
    if json:
        names = ("name", "total_bytes", "usable_bytes", "architecture")
        print_json([{name: getattr(gpu, name) for name in names} for gpu in GPUS])
        return
    rows = [
        (
            gpu.name,
            format_bytes(gpu.total_bytes, "GiB"),
            format_bytes(gpu.usable_bytes, "GiB"),
            format_bytes(gpu.usable_bytes, "GB"),
            gpu.architecture,
        )
        for gpu in GPUS
    ]
    print_table(_COLUMNS, rows)
