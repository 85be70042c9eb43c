"""The parameters of `fully_shard`: shards along the first dimension, and what holds the whole while it is gathered.

Source: torch/distributed/fsdp/_fully_shard/_fsdp_param.py of PyTorch 2.14.
"""

from __future__ import annotations

from memcalc.autograd.tape import BEFORE, WEIGHTS, Allocation, Tape
from memcalc.autograd.tensor import Storage, Tensor
from memcalc.common.sizes import rounded
from memcalc.nn.module import Parameter
from memcalc.tables.dtypes import DType

GATHERED = "gathered weights (FSDP)"


class ShardedStorage(Storage):
    """The memory of a weight that is sharded, which is there while its group is gathered."""

    def __init__(self, tape: Tape, param: FSDPParam) -> None:
        super().__init__(tape, Allocation(WEIGHTS, param.parameter.group, 0, BEFORE))
        self.param = param

    def full_tensor(self, weight: Tensor) -> Tensor:
        """The weight whole: gathered into a tensor of its own where its group is not (DTensor.full_tensor)."""
        p = self.param
        if self.allocation.nbytes or weight.node is not None:
            return weight
        made = self.tape.allocate(p.ranks * p.local * p.stored.itemsize, WEIGHTS, GATHERED)
        return Tensor(weight.shape, weight.stride, p.stored, made)


class FSDPParam:
    """One parameter of a group: its shard, and the memory that it has while it is gathered."""

    def __init__(self, parameter: Parameter, ranks: int, compute: DType | None, copies: int) -> None:
        self.parameter = parameter
        self.count = parameter.copies // copies
        """How many of its kind the group holds: more than one where a group spans several blocks."""
        self.stored: DType = parameter.dtype
        self.compute = compute or self.stored
        self.casts = self.compute is not self.stored
        first = parameter.shape[0] if parameter.shape else 1
        self.rows = -(-first // ranks)
        self.local = self.rows * (parameter.numel // first if first else 0)
        self.ranks = ranks
        self.storage = parameter.storage

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of the shard, its padding included."""
        return (self.rows, *self.parameter.shape[1:])

    def settle(self, tape: Tape) -> None:
        """Be sharded: the weight that modules see has no memory until it is gathered."""
        parameter = self.parameter
        parameter.dtype = self.compute
        parameter.storage = self.storage = ShardedStorage(tape, self)

    def gather(self, tape: Tape) -> None:
        """Give the whole weight, padded, memory of its own."""
        nbytes = rounded(self.ranks * self.local * self.compute.itemsize) * self.count
        made = tape.allocate(nbytes, WEIGHTS, GATHERED)
        self.storage.allocation = made.allocation
        tape.keep(made)

    def free(self, tape: Tape) -> None:
        """Take the memory of the whole weight away."""
        self.storage.allocation.dies = tape.clock
        self.storage.allocation = Allocation(WEIGHTS, self.parameter.group, 0, BEFORE)
