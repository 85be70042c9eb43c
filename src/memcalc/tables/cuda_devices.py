"""What of a GPU decides which kernels PyTorch runs, and what those allocate: one row a kind of GPU."""

from dataclasses import dataclass


@dataclass(frozen=True)
class CudaDevice:
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
