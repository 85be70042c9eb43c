"""What a tape allocated and freed, in order, as `torch.cuda.memory._record_memory_history` writes it."""

from collections import defaultdict
from itertools import groupby

from memcalc.autograd.tape import Tape
from memcalc.tables.cuda_devices import CudaDevice

DEVICES = {
    "h100": CudaDevice((9, 0), 132),
    "a100": CudaDevice((8, 0), 108),
    "a6000": CudaDevice((8, 6), 84),
    "l40s": CudaDevice((8, 9), 142),
    "rtx4090": CudaDevice((8, 9), 128),
    "t4": CudaDevice((7, 5), 40),
    "b200": CudaDevice((10, 0), 148),
}
"""GPUs that rows were recorded for."""


def events(tape: Tape, start: int, end: int) -> list[str]:
    """Ticks [start, end): the bytes of each allocation, and `f2` where the third of them is freed."""
    freed = defaultdict(list)
    for index, allocation in enumerate(tape.allocations[start:end]):
        freed[allocation.dies - start].append(f"f{index}")
    found: list[str] = []
    for tick in range(end - start + 1):
        found += freed[tick]
        if tick < end - start:
            found.append(str(tape.allocations[start + tick].raw_nbytes))
    return found


def in_one_order(found: list[str]) -> list[list[str]]:
    """Events with frees between two allocations sorted: their order changes nothing."""
    return [sorted(group) for _, group in groupby(found, key=lambda event: event.startswith("f"))]
