"""What a PyTorch process takes of a GPU outside its allocator: driver, kernels and libraries, by GPU. One row a GPU.

Readings of processes under CUDA 11.7 and later, which load kernels when they are first needed (lazy loading): what an
out-of-memory message gives for the process, less what PyTorch reserved, or the figure of a process that had allocated
nothing. Before that a process took about 1,000 MiB (1,001 on an RTX 3090 with CUDA 11.1, 1,006 on a TITAN V with CUDA
10.1: pytorch/pytorch issues 54564 and 28394). Processes with several GPUs are left out (809 MiB on an RTX 5090, 860 and
973 on an A100): NCCL's buffers are counted by themselves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from memcalc.common.sizes import MIB

if TYPE_CHECKING:
    from memcalc.tables.gpus import Gpu


@dataclass(frozen=True)
class Readings:
    """What single processes took on a GPU of this compute capability, in MiB. `source` says whose readings they are."""

    gpu: str
    capability: tuple[int, int]
    mib: tuple[int, ...]
    source: str


_MESSAGES = "out-of-memory messages in public logs"
_OTHERS = "other processes in out-of-memory messages of public logs"

MEASURED = "RTX-A6000"
"""The GPU on which training and inference were measured each by itself (`tables/overheads.py`)."""

READINGS = (
    Readings("T4", (7, 5), (140, 198, 205), f"{_MESSAGES}, torch 2.9 and later"),
    Readings("A100-80GB", (8, 0), (414, 502, 502), f"{_MESSAGES}, torch 2.5 to 2.9; the least had allocated nothing"),
    Readings("RTX-3060", (8, 6), (99,), f"{_MESSAGES}, 2026"),
    Readings("RTX-3090", (8, 6), (308, 312), f"{_MESSAGES}, torch 2.1"),
    Readings("RTX-A4000", (8, 6), (205,), "DengKaiCQ/VGGT-Long issue 6, 2025"),
    Readings(MEASURED, (8, 6), (702, 710), "outside the allocator in ten runs, torch 2.14.1+cu130"),
    Readings("RTX-4060", (8, 9), (92,), _MESSAGES),
    Readings("RTX-4090", (8, 9), (450, 455, 498), f"{_MESSAGES} and 3DTopia/Phidias-Diffusion issue 8"),
    Readings("L4", (8, 9), (250,), f"{_MESSAGES}, 2026"),
    Readings("L40S", (8, 9), (346, 517), _MESSAGES),
    Readings("H100-80GB", (9, 0), (601,), f"{_MESSAGES}, torch 2.5 to 2.8"),
    Readings("H200", (9, 0), (612,), _OTHERS),
    Readings("B200", (10, 0), (717,), f"{_MESSAGES}; an upper bound, as what was reserved is not told"),
    Readings("B300", (10, 3), (618,), _OTHERS),
    Readings("RTX-5090", (12, 0), (499, 592), f"{_MESSAGES}, 2025"),
)


def context_of(gpu: Gpu | None) -> tuple[int, str] | None:
    """Bytes of the CUDA context on a GPU, and where that comes from.

    It is the most of the readings: a job that is said to fit shall fit. None where neither the GPU nor its like was
    read, and where it was measured for training and inference each.
    """
    if gpu is None or gpu.name == MEASURED:
        return None
    own = [row for row in READINGS if row.gpu == gpu.name]
    like = own or [row for row in READINGS if row.capability == gpu.compute_capability]
    if not like:
        return None
    mib = sorted(reading for row in like for reading in row.mib)
    which = "one reading" if len(mib) == 1 else f"the most of {len(mib)} readings, {mib[0]} to {mib[-1]} MiB"
    whose = like[0].source if own else f"of GPUs of its compute capability: {', '.join(row.gpu for row in like)}"
    return mib[-1] * MIB, f"{which} ({whose})"
