"""`memcalc gpus`: the table of GPUs."""

from memcalc.cli.output import print_table
from memcalc.tables.gpus import GPUS
from memcalc.units import format_bytes


def command() -> None:
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
    print_table(("name", "board", "usable", "usable in GB", "architecture"), rows, right=(1, 2, 3))
