"""What a process can have of a GPU's memory: the total that CUDA reports, which is less than the driver's figure.

`torch.cuda.get_device_properties(0).total_memory` and the capacity in out-of-memory messages say it. On Linux the
driver keeps 0.2 to 0.9 GiB for itself, by card and by version; on Windows a GeForce shows nearly all of its memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Reading:
    """A total that CUDA reports, MiB; `estimated` where no reading of this card is known."""

    mib: int
    source: str
    estimated: bool = False


_LOGS = "run logs and out-of-memory messages in public issue threads, Linux"


def _read(mib: int, spread: str) -> Reading:
    return Reading(mib, f"{_LOGS}: {spread}")


_READINGS: Mapping[str, Reading] = {
    # GeForce
    "GTX-1080": _read(8119, "7.92 to 7.93 GiB"),
    "GTX-1080-Ti": _read(11178, "10.91 to 10.92 GiB"),
    "RTX-2060": _read(5927, "5.79 GiB"),
    "RTX-2070": _read(7973, "7.79 GiB"),
    "RTX-2080": _read(7973, "7.79 GiB"),
    "RTX-2080-Ti": _read(11011, "10.75 to 10.76 GiB"),
    "TITAN-RTX": _read(24212, "23.64 to 23.65 GiB"),
    "RTX-3060": _read(11910, "11.63 (torch 2.10) to 11.76 GiB"),
    "RTX-3070": _read(7973, "7.79 GiB"),
    "RTX-3080": _read(10009, "9.77 to 9.78 GiB"),
    "RTX-3080-Ti": _read(11910, "11.63 (2026) to 11.77 GiB"),
    "RTX-3090": _read(24146, "23.57 (2026) to 23.70 GiB"),
    "RTX-4060": _read(7806, "7.62 to 7.63 GiB"),
    "RTX-4060-Ti-8GB": _read(7806, "7.62 GiB"),
    "RTX-4070": _read(12002, "11.71 to 11.72 GiB"),
    "RTX-4080": _read(16049, "15.67 GiB"),
    "RTX-4090": _read(24077, "23.49 (2026) to 23.65 GiB"),
    "RTX-5090": _read(32113, "31.36 to 31.37 GiB"),
    # Workstation
    "RTX-A4000": _read(15985, "15.61 (2025) to 15.73 GiB"),
    "RTX-A5000": _read(24248, "23.68 GiB; 22.19 with ECC on"),
    "RTX-A6000": _read(48671, "47.40 (driver 560 and later) to 47.54 GiB; 44.5 with ECC on"),
    "RTX-6000-Ada": _read(48520, "47.38 to 47.48 GiB"),
    "RTX-PRO-6000": _read(97249, "94.96 to 95.22 GiB"),
    # Data centre
    "P100-16GB": _read(16280, "15.90 GiB"),
    "V100-16GB": _read(16130, "15.75 to 15.78 GiB"),
    "V100-32GB": _read(32494, "31.73 to 31.75 GiB"),
    "T4": _read(14914, "14.56 (driver 550 and later) to 14.76 GiB"),
    "A10G": _read(22584, "22.05 to 22.20 GiB"),
    "A40": _read(45416, "44.35 to 44.56 GiB; 47.5 with ECC off"),
    "L4": _read(22559, "22.03 to 22.17 GiB"),
    "L40S": _read(45455, "44.39 to 44.52 GiB"),
    "A100-40GB": _read(40441, "39.38 to 39.59 GiB"),
    "A100-80GB": _read(81152, "79.10 to 79.35 GiB"),
    "H20": _read(97285, "95.00 GiB"),
    "H100-80GB": _read(81089, "79.10 to 79.65 GiB"),
    "H100-NVL-94GB": _read(95320, "93.00 to 93.10 GiB"),
    "H200": _read(143073, "139.72 to 139.81 GiB"),
    "GH200-96GB": _read(96768, "94.50 GiB"),
    "B200": _read(182630, "178.35 GiB"),
    "GB200": _read(188733, "184.31 GiB"),
    "B300": _read(274115, "267.69 GiB"),
}


def cuda_total(name: str, mib: int, amd: bool) -> Reading:
    """The total that CUDA, or ROCm, reports for a card whose driver reports `mib`."""
    if amd:
        return Reading(mib, "ROCm reports what rocm-smi does: 23.98 GiB of an RX 7900 XTX, 255.98 of an MI325X")
    if name in _READINGS:
        return _READINGS[name]
    return Reading(mib - kept_by_driver(mib), "no reading is known: less what drivers keep of cards of its size", True)


def kept_by_driver(mib: int) -> int:
    """MiB that a recent Linux driver keeps of a card of `mib`, as a line through the readings here (within 0.2 GiB).

    380 of 8 GiB, 420 of 24, 485 of 48, 610 of 96, 840 of 185.
    """
    return 360 + round(2.6 * mib / 1024)
