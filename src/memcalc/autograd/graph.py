"""A small autograd on shapes: nodes, what they save, and the engine that runs them in PyTorch's order.

Sources: torch/csrc/autograd (engine.cpp, input_buffer.cpp, accumulate_grad.cpp) and torch/utils/checkpoint.py of
PyTorch 2.14; the order inside a node was read off timelines of `torch.distributed._tools.MemTracker`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol
from weakref import ref

from memcalc.autograd.offloading import can_offload, offload
from memcalc.autograd.reference_counts import only_reference
from memcalc.autograd.spans import TracedBlock
from memcalc.autograd.tape import ACTIVATIONS, GRADIENTS, TEMPORARY, Allocation, Tape
from memcalc.autograd.tensor import Storage, Tensor, dense_stride, is_contiguous
from memcalc.common.sizes import Shape
from memcalc.tables.dtypes import DType

Grads = Sequence[Tensor | None]
Backward = Callable[["Node", Grads], "list[Tensor | None]"]
"""Computes the gradients of a node's inputs, in the order of `node.edges`, from those of its outputs."""

_FIRST = 1 << 60
"""Sequence number of the nodes that accumulate parameter gradients: they run before everything else."""


class Node:
    """One operation in the graph.

    `edges` are the inputs that autograd knows: (node that made it, output slot, shape, dtype), or None for an input
    that needs no gradient. `saved` holds storages, or slots of a checkpoint frame in their place, which are `unpacked`
    while backward runs.
    """

    __slots__ = (
        "backward",
        "block",
        "card",
        "context",
        "edges",
        "hooks",
        "pending",
        "received",
        "saved",
        "scope",
        "sequence",
        "tape",
        "unpacked",
    )

    def __init__(self, tape: Tape, backward: Backward, inputs: Sequence[Tensor | None], context: Any) -> None:
        self.tape = tape
        self.backward = backward
        self.context = context
        self.edges: list[tuple[Node, int, Shape, DType] | None] = [
            None if x is None or x.node is None else (x.node, x.slot, x.shape, x.dtype) for x in inputs
        ]
        self.saved: list[Storage | CheckpointSlot | Offloaded] = []
        self.unpacked: list[Storage] = []
        self.sequence = tape.sequence
        tape.sequence += 1
        self.block: TracedBlock | None = tape.block
        self.scope = tape.scope
        self.card = tape.card
        self.pending = 0
        self.received: list[Tensor | None] | None = None
        self.hooks: tuple[Callable[[], None], ...] = ()
        """What runs when the gradients are there, before what was saved is unpacked (`Tensor.register_hook`)."""

    def save(self, kept: Tensor | Storage, *, output: bool = False) -> None:
        """Keep a tensor for backward (in the frame of the checkpointed block, when one is running).

        `output` says that the operation itself made it, where it is not what was allocated last.
        """
        storage = kept if isinstance(kept, Storage) else kept.storage
        frame = self.tape.checkpoint
        if self.tape.offloading and frame is None and isinstance(kept, Tensor) and can_offload(kept):
            self.saved.append(Offloaded(offload(self.tape, kept)))
        elif frame is None:
            allocation = storage.allocation
            if self.tape.phase != "backward":  # there a block runs again
                allocation.saved = True
            if allocation.row == TEMPORARY:
                allocation.row = ACTIVATIONS
            self.saved.append(storage)
        else:
            frame.pack(self, storage, output=output)

    def saved_storages(self) -> list[Storage]:
        """What was saved, while backward runs."""
        return self.unpacked or [item for item in self.saved if isinstance(item, Storage)]

    def needs(self, index: int) -> bool:
        """Whether the gradient of input `index` is asked for."""
        return self.edges[index] is not None


def record(
    tape: Tape, out: Tensor, backward: Backward, inputs: Sequence[Tensor | None], context: Any = None
) -> Node | None:
    """Make `out` the result of a node if any input needs a gradient; returns the node, to save tensors with."""
    if not tape.grad_enabled:
        return None
    for x in inputs:
        if x is not None and x.node is not None:
            break
    else:
        return None
    out.node = node = Node(tape, backward, inputs, context)
    if tape.offloading:
        tape.last_output = out.storage.allocation
    return node


class AccumulateGrad(Node):
    """The end of the graph at a leaf: the first gradient is taken over, later ones are added into it.

    `row` of the box is where the gradient shows: that of a trained weight is a gradient, others are temporary.
    """

    __slots__ = ("allocation", "gradient", "name", "post_accumulate_hook", "reached", "row", "stride")

    def __init__(self, tape: Tape, name: str, gradient: Tensor | None, row: str = GRADIENTS) -> None:
        super().__init__(tape, _accumulate, (), None)
        self.sequence = _FIRST + tape.sequence
        self.name = name
        self.gradient = gradient
        self.reached = False
        self.allocation: Allocation | None = None
        """The memory that the gradient keeps: that of a larger tensor where it is a view of one."""
        self.row = row
        self.stride: Shape | None = None
        """How the leaf lies in memory, where that is not row by row."""
        self.post_accumulate_hook: Callable[[AccumulateGrad], None] | None = None
        """Told when the gradient is there (an optimizer that steps in backward)."""


def _accumulate(node: Node, grads: Grads) -> list[Tensor | None]:
    """Take a gradient over; one that does not lie in memory as its weight does, or that goes elsewhere too, is copied.

    Source: torch/csrc/autograd/functions/accumulate_grad.h, `is_tensor_stealable`.
    """
    assert isinstance(node, AccumulateGrad)
    shared = not only_reference(grads)  # asked before a local refers to it too
    new = grads[0]
    node.reached = node.reached or new is not None
    copied = new is not None and (shared or not _same_layout(node, new.shape, new.stride))
    if new is not None and not copied:
        node.allocation = new.storage.allocation
    if new is not None and node.gradient is None:
        if copied:
            new = node.tape.empty(new.shape, new.dtype)
        node.gradient = new.detach()
        allocation = new.storage.allocation
        allocation.row, allocation.name = node.row, node.name
    if new is not None and node.post_accumulate_hook is not None:
        node.post_accumulate_hook(node)
    return []


def _same_layout(leaf: AccumulateGrad, shape: Shape, stride: Shape) -> bool:
    """Whether a gradient lies in memory as its leaf does."""
    return is_contiguous(shape, stride) if leaf.stride is None else leaf.stride == stride


def require_gradient(x: Tensor) -> Tensor:
    """Make `x` a leaf that needs a gradient (`requires_grad_()`), unless the graph leads to it already.

    The leaf's end of the graph keeps both `x` and its gradient.
    """
    tape = x.tape
    if x.node is None and tape.grad_enabled:
        node = AccumulateGrad(tape, tape.scope, None, TEMPORARY)
        node.context = x.storage
        tape.kept_by_graph.append(node)
        node.stride = dense_stride(x.shape, x.stride)
        x.node = node
    return x


def as_parameter(x: Tensor) -> Tensor:
    """`torch.nn.Parameter(x)`: a leaf on the same storage, whose gradient lasts as long as the graph does."""
    made = x.detach()
    if x.tape.grad_enabled:
        made.node = leaf = AccumulateGrad(x.tape, x.tape.scope, None, TEMPORARY)
        leaf.stride = x.stride
        x.tape.kept_by_graph.append(leaf)
    return made


class Offloaded:
    """Stands in a node for a tensor that lies in host memory, and is copied back when it is needed."""

    __slots__ = ("nbytes",)

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes


# -- non-reentrant checkpointing --------------------------------------------------------------------------------------


class _StopRecomputation(Exception):
    """Everything that the block had saved has been packed again."""


class CheckpointSlot:
    """Stands in a node for a tensor that will be recomputed."""

    __slots__ = ("__weakref__", "frame", "storage")

    def __init__(self, frame: CheckpointFrame) -> None:
        self.frame = frame
        self.storage: Storage | None = None


class Saver(Protocol):
    """What saves tensors for backward: a node, or an argument of a checkpointed call."""

    tape: Tape
    saved: list[Storage | CheckpointSlot | Offloaded]


class CheckpointFrame:
    """One checkpointed call: how to run it again, and the slots that wait for what it saves.

    `rerun` keeps the arguments of the call alive, as PyTorch's closure does.
    """

    __slots__ = ("count", "recomputed", "rerun", "slots")

    def __init__(self, rerun: Callable[[], object]) -> None:
        self.rerun = rerun
        self.count = 0
        self.slots: list[ref[CheckpointSlot]] = []
        self.recomputed = False

    def pack(self, node: Saver, storage: Storage, *, output: bool = False) -> None:
        """In the first run: leave a slot in `node`. When run again: fill the next slot, and stop after the last.

        An operation packs its inputs before it runs, so where the last is no `output`, its result is never made.
        """
        if not self.recomputed:
            slot = CheckpointSlot(self)
            node.saved.append(slot)
            self.slots.append(ref(slot))
            return
        waiting = self.slots[self.count]()
        self.count += 1
        if waiting is not None:
            allocation = storage.allocation
            if allocation.row == TEMPORARY:
                allocation.row = ACTIVATIONS
            waiting.storage = storage
        node.saved.append(storage)
        if self.count == len(self.slots):
            if not output and storage.allocation is not node.tape.allocations[-1]:
                node.tape.undo_last()
            raise _StopRecomputation

    def recompute(self, tape: Tape) -> None:
        """Run the block again, until its last saved tensor exists."""
        self.recomputed = True
        before = tape.checkpoint, tape.sequence, tape.grad_enabled, tape.scope
        tape.checkpoint, tape.grad_enabled = self, True
        kept_before = len(tape.kept_by_graph)
        try:
            self.rerun()
        except _StopRecomputation as stop:
            stop.__traceback__ = None
        finally:
            del tape.kept_by_graph[kept_before:]  # the graph of this run is dropped
            tape.checkpoint, tape.sequence, tape.grad_enabled, tape.scope = before


def unpack(node: Saver) -> list[Storage]:
    """The saved storages; recomputes the block if they are not there yet. Recomputed ones are handed out once."""
    out = []
    for item in node.saved:
        if isinstance(item, CheckpointSlot):
            if item.storage is None and not item.frame.recomputed:
                item.frame.recompute(node.tape)
            if item.storage is not None:
                out.append(item.storage)
                item.storage = None
        elif isinstance(item, Offloaded):
            out.append(node.tape.allocate(item.nbytes, TEMPORARY, "offloaded activations (returned)"))
    return out
