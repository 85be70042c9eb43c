"""What of a GPU decides which kernels PyTorch runs, and what those allocate: one row a kind of GPU."""

from typing import NamedTuple


class CudaDevice(NamedTuple):
    """A kind of GPU as kernels see it: compute capability and number of multiprocessors."""

    capability: tuple[int, int]
    sms: int

    @property
    def small_shared_memory(self) -> bool:
        """Whether a multiprocessor has about 100 KB of shared memory (consumer GPUs since Ampere), not 160 or more."""
        return self.capability >= (8, 6) and self.capability[0] in (8, 12)

    @property
    def threads_per_sm(self) -> int:
        """Most resident threads of a multiprocessor. Source: CUDA C++ Programming Guide, compute capabilities."""
        if self.capability == (7, 5):
            return 1024
        return 1536 if self.small_shared_memory else 2048


_SMS: dict[str, int] = {
    "GTX-1060-6GB": 10, "GTX-1070": 15, "GTX-1080": 20, "GTX-1080-Ti": 28, "GTX-1660-Ti": 24,
    "RTX-2060": 30, "RTX-2070": 36, "RTX-2080": 46, "RTX-2080-Ti": 68, "TITAN-RTX": 72,
    "RTX-3050": 20, "RTX-3060": 28, "RTX-3060-Ti": 38, "RTX-3070": 46, "RTX-3070-Ti": 48,
    "RTX-3080": 68, "RTX-3080-12GB": 70, "RTX-3080-Ti": 80, "RTX-3090": 82, "RTX-3090-Ti": 84,
    "RTX-4060": 24, "RTX-4060-Ti-8GB": 34, "RTX-4060-Ti-16GB": 34, "RTX-4070": 46, "RTX-4070-Super": 56,
    "RTX-4070-Ti": 60, "RTX-4070-Ti-Super": 66, "RTX-4080": 76, "RTX-4080-Super": 80, "RTX-4090": 128,
    "RTX-5060": 30, "RTX-5060-Ti-16GB": 36, "RTX-5070": 48, "RTX-5070-Ti": 70, "RTX-5080": 84, "RTX-5090": 170,
    "Quadro-RTX-6000": 72, "Quadro-RTX-8000": 72, "RTX-A4000": 48, "RTX-A4500": 56, "RTX-A5000": 64, "RTX-A6000": 84,
    "RTX-2000-Ada": 22, "RTX-4000-Ada": 48, "RTX-4500-Ada": 60, "RTX-5000-Ada": 100, "RTX-6000-Ada": 142,
    "RTX-PRO-6000": 188, "P100-16GB": 56, "V100-16GB": 80, "V100-32GB": 80, "T4": 40, "A2": 10, "A10": 72, "A10G": 80,
    "A16": 10, "A30": 56, "A40": 84, "A100-40GB": 108, "A100-80GB": 108, "A800-80GB": 108, "L4": 58, "L20": 92,
    "L40": 142, "L40S": 142, "H20": 78, "H100-80GB": 132, "H100-NVL-94GB": 132, "H800-80GB": 132, "H200": 132,
    "GH200-96GB": 132, "B200": 148, "GB200": 152, "B300": 148, "GB300": 152,
}  # fmt: skip
"""Multiprocessors of a GPU (a row of `gpus.py`). Source: NVIDIA's datasheets and architecture whitepapers."""

_USUAL: dict[tuple[int, int], int] = {(8, 0): 108, (9, 0): 132, (10, 0): 148, (10, 3): 148, (12, 0): 170}
"""Those of the largest GPU of a compute capability, for one that has no row above."""

UNNAMED = CudaDevice((8, 0), 108)
"""What stands for a GPU of which nothing is said but its memory: an A100."""


def cuda_device(name: str, capability: tuple[int, int] | None) -> CudaDevice:
    """The GPU of that name as kernels see it; of another name, the largest of its capability."""
    if capability is None:
        return UNNAMED
    sms = _SMS.get(name) or _USUAL.get(capability) or UNNAMED.sms
    return CudaDevice(capability, sms)
