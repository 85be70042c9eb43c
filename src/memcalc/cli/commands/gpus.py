"""`memcalc gpus`: the table of GPUs."""

from typing import Annotated

from memcalc.cli.output import JSON, print_json, print_table
from memcalc.render.tables import Column
from memcalc.tables.gpu_features import Features, features
from memcalc.tables.gpus import GPUS, Gpu
from memcalc.units import format_bytes

_COLUMNS = (
    Column("name", whole=True),
    Column("board", right=True, whole=True, needs=70),
    Column("usable", right=True, whole=True),
    Column("in GB", right=True, whole=True, needs=80),
    Column("architecture"),
    Column("flash", whole=True),
    Column("fp8", whole=True),
    Column("NVLink", right=True, whole=True, needs=90),
)


def command(json: Annotated[bool, JSON] = False) -> None:
    """List the GPUs that --gpu knows, with what deciding needs: what CUDA reports of the memory, which is all that a
    process gets; the versions of FlashAttention that run; fp8; GB a second over NVLink. "?": no source says it."""
    if json:
        print_json([_values(gpu, features(gpu)) for gpu in GPUS])
        return
    print_table(_COLUMNS, [_row(gpu, features(gpu)) for gpu in GPUS])


def _values(gpu: Gpu, known: Features) -> dict[str, object]:
    names = ("name", "total_bytes", "usable_bytes", "architecture", "compute_capability")
    return {**{name: getattr(gpu, name) for name in names}, **known._asdict()}


def _row(gpu: Gpu, known: Features) -> tuple[str, ...]:
    fp8 = {True: "yes", False: "no", None: "?"}[known.fp8]
    nvlink = "?" if known.nvlink_gb_per_second is None else f"{known.nvlink_gb_per_second:g} GB/s"
    return (
        gpu.name,
        format_bytes(gpu.total_bytes, "GiB"),
        format_bytes(gpu.usable_bytes, "GiB"),
        format_bytes(gpu.usable_bytes, "GB"),
        gpu.architecture,
        "?" if known.flash_attention is None else ", ".join(map(str, known.flash_attention)) or "no",
        fp8,
        "PCIe" if known.nvlink_gb_per_second == 0 else nvlink,
    )
