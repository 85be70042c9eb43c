"""The units of FullyShardedDataParallel: when a flat parameter is gathered, freed and its gradient reduced."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from memcalc.autograd.graph import AccumulateGrad, Grads, Node
from memcalc.autograd.tape import BEFORE, GRADIENTS, OVERHEAD, WEIGHTS, Allocation, Tape
from memcalc.autograd.tensor import Storage, Tensor
from memcalc.common.sizes import rounded
from memcalc.nn.module import Parameter
from memcalc.optim.weight import SCALAR
from memcalc.parallel import traffic
from memcalc.parallel.engine import leaf, tensors_of
from memcalc.parallel.wrapping import Unit

if TYPE_CHECKING:
    from memcalc.parallel.fsdp1 import FSDP1

GATHERED = "gathered flat weights (FSDP1)"
BUFFERS = "gradients on their way (FSDP1)"
ALIGNED_BYTES = 16
"""`_get_aligned_numel` of torch/distributed/fsdp/_flat_param.py."""
SHARDED = "sharded gradients"


class FlatUnit:
    """One flat parameter (FlatParamHandle) and the modules that see views of it."""

    def __init__(self, engine: FSDP1, unit: Unit, ranks: int, *, reshard: bool) -> None:
        self.engine = engine
        self.modules = unit.modules
        self.root = unit.root
        self.params = unit.parameters
        self.copies = unit.copies
        self.counts = [parameter.copies // unit.copies for parameter in unit.parameters]
        self.ranks = ranks
        self.reshard_after_forward = reshard
        self.stored = unit.parameters[0].dtype if unit.parameters else engine.job.compute
        self.compute = engine.job.compute if engine.casts else self.stored
        self.starts = list(self._starts(ALIGNED_BYTES // self.compute.itemsize))
        filled = self.starts.pop()
        self.numel = -(-filled // ranks) * ranks
        """Elements of the flat parameter: each weight starts at a multiple of 16 bytes, the end is padded."""
        self.paddings += self.numel > filled
        self.shard = self.numel // ranks
        self.leaves = {id(p): leaf(p) for p in unit.parameters}
        self.trains = any(node is not None for node in self.leaves.values())
        self.state = "idle"
        self.unsharded = False
        self.index = 0
        self.reached = False
        self.flat: AccumulateGrad | None = None

    def _starts(self, aligned: int) -> Iterator[int]:
        """Where each weight starts in the flat parameter, and where the last ends."""
        start, self.paddings = 0, 0
        for parameter, count in zip(self.params, self.counts, strict=True):
            for place in range(count):
                padding = -start % aligned
                self.paddings += padding > 0
                start += padding
                if place == 0:
                    yield start
                start += parameter.numel
        yield start

    def settle(self, tape: Tape) -> None:
        """Be sharded: modules see weights without memory."""
        self.tape = tape
        self.storage = Storage(tape, Allocation(WEIGHTS, "", 0, BEFORE))
        for parameter in self.params:
            parameter.dtype = self.compute
            parameter.storage = self.storage
            parameter.is_view = True

    def pieces(self) -> Iterator[tuple[Parameter, int]]:
        """The elements of every weight that lie in rank 0's shard; of several alike, those of all of them."""
        for parameter, count, start in zip(self.params, self.counts, self.starts, strict=True):
            inside = min(max(self.shard - start, 0), parameter.numel * count)
            yield parameter, inside // count

    # -- weights --------------------------------------------------------------------------------------------------

    def unshard(self) -> None:
        """Gather the flat parameter, whose storage is the all-gather's output; a cast shard lives meanwhile."""
        if self.unsharded or not self.params:
            return
        cast = None
        if self.compute is not self.stored:
            cast = self.tape.allocate(self.shard * self.compute.itemsize, OVERHEAD, GATHERED)
        made = self.tape.allocate(self.ranks * self.shard * self.compute.itemsize, WEIGHTS, GATHERED)
        self.storage.allocation = made.allocation
        traffic.gather(self.tape, self.ranks * self.shard * self.compute.itemsize, self.ranks)
        self.tape.keep(made)
        self.unsharded = True
        del cast

    def reshard(self) -> None:
        """Free the flat parameter."""
        if self.unsharded:
            self.storage.allocation.dies = self.tape.clock
            self.storage.allocation = Allocation(WEIGHTS, "", 0, BEFORE)
            self.unsharded = False

    # -- hooks ----------------------------------------------------------------------------------------------------

    def __call__(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the unit's module between its hooks."""
        if self.state == "backward":  # a checkpointed block runs again
            return module.call(*args, **kwargs)
        self.unshard()
        self._view_parameters()
        out = self.engine.run_root(module, *args) if self.root else module.call(*args, **kwargs)
        if self.reshard_after_forward:
            self.reshard()
        self.index = len(self.engine.post_forward_order)
        self.engine.post_forward_order.append(self)
        for tensor in tensors_of(out):
            if tensor.node is not None:
                tensor.node.hooks = (*tensor.node.hooks, self.pre_backward)
        return out

    def _view_parameters(self) -> None:
        """Let every weight be a view of the flat parameter, frozen ones too where any is trained."""
        if not (self.trains and self.params and self.tape.grad_enabled):
            return
        flat = Tensor((self.numel,), (1,), self.compute, self.storage)
        flat.node = self.flat = AccumulateGrad(self.tape, SHARDED, None)
        self.flat.post_accumulate_hook = self._post_backward
        split = Node(self.tape, self._concatenate, (flat,), None)
        for slot, parameter in enumerate(self.params):
            parameter.node, parameter.slot = split, slot

    def pre_backward(self) -> None:
        """Have the weights there, and those of the unit that comes next (BACKWARD_PRE)."""
        if self.state == "backward":
            return
        self.state = "backward"
        self.unshard()
        if self.index > 0 and self.engine.layout.backward_prefetch:
            self.engine.post_forward_order[self.index - 1].unshard()

    def _concatenate(self, node: Node, grads: Grads) -> list[Tensor | None]:
        """The backward of the views: one flat gradient of all single ones."""
        for parameter, gradient in zip(self.params, grads, strict=False):
            own = self.leaves[id(parameter)]
            if own is not None and gradient is not None:
                own.reached = True
        zeros = [self.tape.allocate(SCALAR, OVERHEAD, BUFFERS) for _ in range(self.paddings)]
        made = self.tape.allocate(self.numel * self.compute.itemsize, GRADIENTS, BUFFERS)
        del zeros
        assert isinstance(grads, list)
        grads.clear()
        return [Tensor((self.numel,), (1,), self.compute, made)]

    def _post_backward(self, node: AccumulateGrad) -> None:
        """Free the weights, and reduce the flat gradient into this rank's shard."""
        self.reached = True
        self.reshard()
        engine, tape, reduce = self.engine, self.tape, self.engine.reduce_dtype
        wide = None
        if reduce is not self.compute:
            wide = tape.allocate(self.numel * reduce.itemsize, OVERHEAD, BUFFERS)
        traffic.scatter(tape, self.numel * reduce.itemsize, self.ranks)
        output = tape.allocate(self.shard * reduce.itemsize, GRADIENTS, SHARDED)
        del wide
        if reduce is not self.stored:
            output = tape.allocate(self.shard * self.stored.itemsize, GRADIENTS, SHARDED)
        if not engine.accumulates_sharded:
            tape.keep(output)
        if engine.accumulates_whole:
            tape.release(rounded(self.numel * self.compute.itemsize), GRADIENTS, engine.STANDING)
        node.gradient = None

    def finish(self) -> None:
        """Backward is over."""
        self.reshard()
        self.state = "idle"
        self.flat = None
        for parameter in self.params:
            parameter.node, parameter.slot, parameter.is_view = self.leaves[id(parameter)], 0, False
