"""What of a GPU decides which kernels PyTorch runs, and what those allocate: one row a kind of GPU."""

from memcalc.common.records import frozen


@frozen
class CudaDevice:
    """A kind of GPU as kernels see it: compute capability and number of multiprocessors."""

    capability: tuple[int, int]
    sms: int
