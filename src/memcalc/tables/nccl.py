"""What NCCL allocates outside PyTorch's allocator. One row a fact, each with its source."""

from typing import NamedTuple


class NcclBuffers(NamedTuple):
    """Bytes of one channel's buffers by protocol, and how many channels a communicator is taken to have."""

    simple: int
    ll128: int
    ll: int
    channels: int
    most_channels: int
    source: str

    @property
    def channel(self) -> int:
        """Bytes that one channel's receiving connection takes."""
        return self.simple + self.ll128 + self.ll

    @property
    def communicator(self) -> int:
        """Bytes of a communicator of the usual number of channels."""
        return self.channels * self.channel


NCCL = NcclBuffers(
    4_194_304,
    4_915_200,
    524_288,
    24,
    64,
    "NCCL 2.30, src/init.cc and src/transport/p2p.cc: a receiver's buffers of the three protocols; the number of "
    "channels follows the topology (NCCL_DEBUG=INFO prints it), 24 on eight H100 by NVLink, 64 at most",
)

PUBLISHED_SPREAD = "1.6 GB for one communicator to 6 GB for three and more (NVIDIA/nccl issues 864 and 986)"
