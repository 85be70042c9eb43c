"""`memcalc gpus`: the table of GPUs."""

from typing import Annotated

from memcalc.cli.output import JSON, print_json_or_table
from memcalc.tables.gpus import GPUS
from memcalc.units import format_bytes


def command(*, as_json: Annotated[bool, JSON] = False) -> None:
    """List the GPUs that --gpu knows: memory as the driver reports it, and what CUDA reports, which a process gets."""
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
    values = [
        {
            "name": gpu.name,
            "total_bytes": gpu.total_bytes,
            "usable_bytes": gpu.usable_bytes,
            "architecture": gpu.architecture,
            "source": gpu.source,
        }
        for gpu in GPUS
    ]
    heads = ("name", "board", "usable", "usable in GB", "architecture")
    print_json_or_table(as_json, heads, rows, (1, 2, 3), values)
