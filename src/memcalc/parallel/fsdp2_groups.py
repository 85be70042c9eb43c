"""The groups of `fully_shard`: when each is gathered, freed and reduced.

Source: torch/distributed/fsdp/_fully_shard/{_fsdp_param,_fsdp_param_group,_fsdp_state,_fsdp_collectives}.py of PyTorch
2.14; the names are its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from memcalc.autograd.graph import Grads, Node, record
from memcalc.autograd.tape import GRADIENTS, OVERHEAD, Tape
from memcalc.autograd.tensor import Storage, Tensor
from memcalc.parallel import traffic
from memcalc.parallel.engine import leaf, replaced, tensors_of
from memcalc.parallel.fsdp2_params import FSDPParam
from memcalc.parallel.wrapping import Unit

if TYPE_CHECKING:
    from memcalc.parallel.fsdp2 import FSDP2

ALL_GATHER = "all-gather buffers (FSDP)"
REDUCE_SCATTER = "reduce-scatter buffers (FSDP)"
SHARDED = "sharded gradients"

COPY_IN = 1
"""The stream of the inputs and outputs of all-gathers (`all_gather_copy_in_stream`)."""
REDUCE = 2
"""The stream of what reduce-scatters give (`reduce_scatter_stream`)."""
ALL_REDUCE = 3
"""The stream of the all-reduce among replicas (`all_reduce_stream`)."""


class Group:
    """What one call of `fully_shard` owns (FSDPParamGroup), with its states by torch's names."""

    def __init__(self, engine: FSDP2, unit: Unit, ranks: int, *, reshard: bool, root: bool = False) -> None:
        self.engine = engine
        self.modules = unit.modules
        self.root = root
        self.params = [
            FSDPParam(parameter, ranks, engine.param_dtype(parameter), unit.copies) for parameter in unit.parameters
        ]
        self.copies = unit.copies
        self.ranks = ranks
        self.reshard_after_forward = reshard
        self.state = "idle"
        self.unsharded = False
        self.buffer: Storage | None = None
        """The all-gather output that waits to be copied out."""
        self.waiting = False
        self.pending: set[int] = set()
        self.post_forward_indices: list[int] = []
        self.partial: Storage | None = None
        self.reduced = False

    # -- weights --------------------------------------------------------------------------------------------------

    def unshard(self, tape: Tape) -> None:
        """Issue the all-gather: its inputs, cast where they have to be, and its output."""
        if self.waiting or self.unsharded or not self.params:
            return
        self.waiting = True
        if self.ranks == 1:
            return
        inputs = list(self._inputs(tape))
        nbytes = self.ranks * sum(p.local * p.count * p.compute.itemsize for p in self.params)
        self.buffer = tape.allocate(nbytes, OVERHEAD, ALL_GATHER, COPY_IN)
        traffic.gather(tape, nbytes, self.ranks)
        del inputs

    def _inputs(self, tape: Tape) -> Iterator[Storage]:
        """The shards as the all-gather takes them: cast into one flat tensor, or copied from the host one by one."""
        if self.engine.offloads:
            for p in self.params:
                for _ in range(p.count):
                    moved = tape.allocate(p.local * p.stored.itemsize, OVERHEAD, ALL_GATHER, COPY_IN)
                    cast = p.local * p.compute.itemsize
                    yield tape.allocate(cast, OVERHEAD, ALL_GATHER, COPY_IN) if p.casts else moved
                    del moved
            return
        nbytes = sum(p.local * p.count * p.compute.itemsize for p in self.params if p.casts)
        if nbytes:
            yield tape.allocate(nbytes, OVERHEAD, ALL_GATHER, COPY_IN)

    def wait_for_unshard(self, tape: Tape) -> None:
        """Copy the gathered weights out. In forward the buffer stays until the next group's copies are there."""
        if not self.waiting:
            return
        previous = None
        if self.state == "forward":
            previous, self.engine.all_gather_state = self.engine.all_gather_state, None
        for p in self.params:
            moved = self._lone_input(tape, p) if self.ranks == 1 else None
            p.gather(tape)
            del moved
        self.unsharded, self.waiting = True, False
        if self.state == "forward":
            self.engine.all_gather_state = self.buffer
        self.buffer = None
        del previous

    def _lone_input(self, tape: Tape, p: FSDPParam) -> Storage | None:
        if not (p.casts or self.engine.offloads):
            return None
        return tape.allocate(p.local * p.compute.itemsize, OVERHEAD, ALL_GATHER)

    def reshard(self, tape: Tape) -> None:
        """Free the whole weights, unless they stay from forward to backward."""
        if self.state == "forward" and not self.reshard_after_forward:
            return
        if self.unsharded:
            for p in self.params:
                p.free(tape)
            self.unsharded = False

    # -- hooks ----------------------------------------------------------------------------------------------------

    def __call__(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a module of the group between its hooks."""
        return self.run(module, module, *args, **kwargs)

    def run(self, own: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
        """Run `module` as the module `own` of the group: the same, or one that sees the same weights."""
        engine = self.engine
        tape = engine.tape
        if self.state == "pre_backward":  # a checkpointed block runs again
            if not self.unsharded:
                self.unshard(tape)
                self.wait_for_unshard(tape)
            args, kwargs = engine.cast_inputs(args, kwargs)
            return module.call(*args, **kwargs)
        first = self.state != "forward"
        if first:
            self.state = "forward"
            self.pending = {id(one) for one in self.modules}
        args, kwargs = engine.cast_inputs(args, kwargs)
        self.unshard(tape)
        self.wait_for_unshard(tape)
        if first:
            args, kwargs = self._register_post_backward(args, kwargs)
        out = engine.run_root(module, *args) if self.root else module.call(*args, **kwargs)
        self.pending.discard(id(own))
        if not self.pending:
            self.post_forward(out)
        if self.root and engine.layout.accelerate:
            out.convert(engine.job.compute)  # `output_dtype` of Accelerate's policy
        return out

    def post_forward(self, out: Any) -> None:
        """Reshard, note the order, and let backward begin with the hook on what came out."""
        engine = self.engine
        tape = engine.tape
        if tape.phase != "backward":
            self.reshard(tape)
            if self.params:
                self.post_forward_indices.append(len(engine.post_forward_order))
                engine.post_forward_order.append(self)
        self.state = "idle"
        for tensor in tensors_of(out):
            if tensor.node is not None:
                tensor.node.hooks = (*tensor.node.hooks, self.pre_backward)
        if self.root:
            self._complete_others(out)
            engine.all_gather_state = None

    def _complete_others(self, out: Any) -> None:
        """Complete groups of which a module did not run: TRL's fused head reads the head's weight alone."""
        for group in reversed(self.engine.groups):
            if group is not self and group.state == "forward" and group.pending:
                group.pending.clear()
                group.post_forward(out)

    def _register_post_backward(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Pass what needs a gradient through a node whose backward is the group's post-backward."""
        found = [x for x in tensors_of((args, kwargs)) if x.node is not None]
        if not found or not self.engine.tape.grad_enabled:
            return args, kwargs
        passed = [Tensor(x.shape, x.stride, x.dtype, x.storage, is_view=True) for x in found]
        node = record(self.engine.tape, passed[0], self._post_backward_node, found)
        for slot, x in enumerate(passed):
            x.node, x.slot = node, slot
        by_id = {id(x): new for x, new in zip(found, passed, strict=True)}
        return replaced(args, by_id), replaced(kwargs, by_id)

    def _post_backward_node(self, node: Node, grads: Grads) -> list[Tensor | None]:
        self.post_backward()
        return [*grads, *[None] * (len(node.edges) - len(grads))]

    def pre_backward(self) -> None:
        """Have the weights there, and issue the all-gather of the group that comes next."""
        if self.state == "pre_backward":
            return
        self.state = "pre_backward"
        tape = self.engine.tape
        self.unshard(tape)
        self.wait_for_unshard(tape)
        if self.post_forward_indices:
            index = self.post_forward_indices.pop()
            if index > 0:
                self.engine.post_forward_order[index - 1].unshard(tape)

    def post_backward(self) -> None:
        """Free the weights, and reduce the gradients into this rank's shard of them."""
        self.state = "post_backward"
        engine = self.engine
        tape = engine.tape
        accumulated = engine.accumulates_whole
        grads: list[tuple[FSDPParam, Tensor | None]] = []
        for p in self.params:
            node = leaf(p.parameter)
            if node is not None and node.gradient is not None and node.reached:
                grads.append((p, None if accumulated else node.gradient))
                node.gradient = None
        self.reshard(tape)
        engine.reduce_scatter_states.clear()
        if grads:
            self._reduce(tape, grads)

    def _reduce(self, tape: Tape, grads: list[tuple[FSDPParam, Tensor | None]]) -> None:
        """`foreach_reduce`: gradients into one buffer, reduced to the rank's part of it, cast to the stored dtype."""
        engine = self.engine
        stored = grads[0][0].stored
        dtype = engine.reduce_dtype or grads[0][0].compute
        local = sum(p.local * p.count for p, _ in grads)
        whole = tape.allocate(self.ranks * local * dtype.itemsize, OVERHEAD, REDUCE_SCATTER)
        traffic.scatter(tape, self.ranks * local * dtype.itemsize, self.ranks)
        last = grads[-1] if self.ranks > 1 else None  # a loop variable keeps the last gradient to the end
        if engine.accumulates_whole:
            for p, _ in grads[:-1] if last else grads:
                engine.release(p, p.count)
            if last is not None:
                engine.release(last[0], last[0].count - 1)
        grads.clear()
        output = tape.allocate(local * dtype.itemsize, GRADIENTS, SHARDED, REDUCE)
        if engine.layout.replicas > 1:
            self.partial = output
            traffic.reduce(tape, local * dtype.itemsize, engine.layout.replicas, last=True)
        if dtype is not stored:
            stream = ALL_REDUCE if engine.layout.replicas > 1 else REDUCE
            output = tape.allocate(local * stored.itemsize, GRADIENTS, SHARDED, stream)
        self.reduced = True
        engine.reduce_scatter_states.append(whole)
        if not engine.offloads and not engine.accumulates_sharded:
            engine.held.append(output.allocation)
            tape.keep(output)
            if self.partial is not None and dtype is stored:
                self.partial = None
        if last is not None and engine.accumulates_whole:
            engine.release(last[0], 1)
        del last, output
