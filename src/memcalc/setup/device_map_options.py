"""Options of a model that one process spreads over several GPUs, as Transformers and Accelerate do it."""

from collections.abc import Mapping
from typing import Literal

from memcalc.errors import UsageError
from memcalc.setup.options import Options, option
from memcalc.units import parse_size

HOST = ("cpu", "disk")
"""Keys of --max-memory beside the indices of GPUs."""


class DeviceMapOptions(Options):
    """`device_map` and `max_memory` of `from_pretrained`."""

    device_map: Literal["auto", "balanced", "balanced_low_0", "sequential"] | None = option(
        "Device map",
        None,
        "Spread the modules of a model over the GPUs of one process, and over host memory what does not fit, as "
        "Transformers' device_map does; the report is for the most loaded GPU.",
        unset="no; every GPU has the whole model, or its share",
    )
    max_memory: str | None = option(
        "Device map",
        None,
        "What weights may take of each device, such as 20GiB (of each GPU) or 0=10GiB,1=20GiB,cpu=64GiB.",
        unset="all that is free on the GPUs, and any amount of host memory",
    )


def read_max_memory(text: str, gpus: int | None) -> dict[int | str, float]:
    """Bytes by device: a size alone is that of each of `gpus` GPUs, with any amount of host memory.

    Raises UsageError, in one sentence.
    """
    option_name = "--max-memory"
    if "=" not in text:
        if gpus is None:
            raise UsageError(f"{option_name} {text} is for each GPU, but there is no --gpus; add it.")
        return {**dict.fromkeys(range(gpus), parse_size(text, option_name)), "cpu": float("inf")}
    found: dict[int | str, float] = {}
    for item in text.split(","):
        name, _, size = item.partition("=")
        name = name.strip()
        if name not in HOST and not (name.isdecimal() and name.isascii() and len(name) < 6):
            raise UsageError(f"{option_name} takes GPUs by their index, cpu and disk, such as 0=10GiB,cpu=64GiB.")
        device = name if name in HOST else int(name)
        if device in found:
            raise UsageError(f"{option_name} says twice what {name} may take; say it once.")
        found[device] = parse_size(size, option_name)
    most = max((device for device in found if isinstance(device, int)), default=-1)
    if most < 0:
        raise UsageError(f"{option_name} names no GPU; give at least one, such as 0=20GiB.")
    if gpus is not None and most >= gpus:
        raise UsageError(f"{option_name} names GPU {most}, but --gpus is {gpus}, and they count from 0.")
    return in_order(found)


def in_order(room: Mapping[int | str, float]) -> dict[int | str, float]:
    """GPUs by their index, then host memory, then disk."""
    return {device: room[device] for device in sorted(room, key=lambda d: (d in HOST, d == "disk", str(d).zfill(6)))}
