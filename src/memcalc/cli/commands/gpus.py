"""`memcalc gpus`: the table of GPUs."""

from memcalc.cli.output import print_table
from memcalc.tables.gpus import GPUS
from memcalc.units import format_bytes


def command() -> None:
    """List the GPUs that --gpu knows, with their memory as the driver reports it."""
    rows = [
        (gpu.name, format_bytes(gpu.total_bytes, "GiB"), format_bytes(gpu.total_bytes, "GB"), gpu.architecture)
        for gpu in GPUS
    ]
    print_table(("name", "GiB", "GB", "architecture"), rows, right=(1, 2))
