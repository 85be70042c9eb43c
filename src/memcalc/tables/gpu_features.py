"""What a GPU can do besides holding bytes: which attention kernels run on it, fp8, and its link to others.

Sources. FlashAttention: README of Dao-AILab/flash-attention 2.8 (version 2: Ampere, Ada and Hopper; on ROCm MI200,
MI250, MI300 and MI355; version 3: Hopper). fp8: vLLM 0.32, "FP8 W8A8" (compute capability 8.9 and above, MI300), the
condition of torch._scaled_mm. NVLink: NVIDIA's architecture papers and data sheets, both directions of all links of a
GPU together; of cards that come with a PCIe slot too it is that of the SXM module. What none says is None, not "no".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from memcalc.tables.gpus import Gpu


class Features(NamedTuple):
    """What is known of a GPU; None where no source says it."""

    flash_attention: tuple[int, ...] | None
    """Versions of FlashAttention that run on it."""
    fp8: bool | None
    """Whether it multiplies matrices of fp8."""
    nvlink_gb_per_second: float | None
    """GB a second to other GPUs; 0 where there is only PCIe."""


_NVLINK: Mapping[str, float] = {
    "P100-16GB": 160,
    "V100-16GB": 300,
    "V100-32GB": 300,
    "Quadro-RTX-6000": 100,
    "Quadro-RTX-8000": 100,
    "RTX-3090": 112.5,
    "RTX-3090-Ti": 112.5,
    "RTX-A6000": 112.5,
    "A40": 112.5,
    "A100-40GB": 600,
    "A100-80GB": 600,
    "A800-80GB": 400,
    "H100-80GB": 900,
    "H800-80GB": 400,
    "H200": 900,
    "GH200-96GB": 900,
    "B100": 1800,
    "B200": 1800,
    "GB200": 1800,
    "GB300": 1800,
}
"""GB a second."""

_WITHOUT_NVLINK = ("RTX-40", "RTX-50", "L4", "L20", "L40")
"""The beginnings of names of cards that have PCIe alone: GeForce from the 40 series on, Ada cards of servers."""

_FLASH_2 = ((8, 0), (8, 6), (8, 9), (9, 0))
_FLASH_2_AMD = ("gfx90a", "gfx942", "gfx950")
_FP8_AMD = ("gfx942", "gfx950")


def features(gpu: Gpu) -> Features:
    """What is known of a row of the table; nothing of a GPU that is only a size."""
    nvlink = _NVLINK.get(gpu.name)
    if nvlink is None and gpu.name.startswith(_WITHOUT_NVLINK):
        nvlink = 0
    return Features(_flash_attention(gpu), _fp8(gpu), nvlink)


def _flash_attention(gpu: Gpu) -> tuple[int, ...] | None:
    capability = gpu.compute_capability
    if capability in _FLASH_2:
        return (2, 3) if capability == (9, 0) else (2,)
    if gpu.architecture in _FLASH_2_AMD:
        return (2,)
    return () if capability is not None and capability < (8, 0) else None


def _fp8(gpu: Gpu) -> bool | None:
    if gpu.compute_capability is not None:
        return gpu.compute_capability >= (8, 9)
    return gpu.architecture in _FP8_AMD if gpu.architecture else None
