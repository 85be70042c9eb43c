"""The tape: what was allocated, when, for what, and until when.

Its clock counts allocations. An allocation made at clock c is alive at the samples c, c+1, ... up to, but not
including, its `dies`. In-place operations and views allocate nothing and so are no samples: they cannot be a peak.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from math import prod
from typing import TYPE_CHECKING, Final

from memcalc.autograd.spans import Ring, Span, TracedBlock
from memcalc.autograd.tensor import Storage, Tensor, contiguous_stride
from memcalc.common.sizes import ALIGNMENT, Shape
from memcalc.tables.cuda_devices import CudaDevice
from memcalc.tables.dtypes import DType

if TYPE_CHECKING:
    from memcalc.autograd.graph import CheckpointFrame

WEIGHTS: Final = "model_weights"
OPTIMIZER: Final = "optimizer_states"
GRADIENTS: Final = "gradients"
ACTIVATIONS: Final = "activations"
TEMPORARY: Final = "temporary_tensors"
OVERHEAD: Final = "other_overhead"
ROWS: Final = (WEIGHTS, OPTIMIZER, GRADIENTS, ACTIVATIONS, TEMPORARY, OVERHEAD)
"""The six rows of the box, in its order."""

NEVER: Final = 1 << 60
"""`dies` of what outlives the tape."""

BEFORE: Final = -1
"""`born` of what exists before the tape starts."""


class Allocation:
    """One piece of device memory: its row in the box, its part of that row, and its life [born, dies) in ticks.

    `nbytes` is what the allocator takes (rounded up to 512), `raw_nbytes` what the tensor needs. `saved` says whether
    autograd keeps it for backward; `handed_over` whether one repeated block passes it to the next; `aliased` whether a
    view of an input was made; `card` is the GPU that it lies on, where one process uses several; `stream` is the CUDA
    stream that it was made on, 0 the default one: the allocator has a pool for each.
    """

    __slots__ = (
        "aliased",
        "born",
        "card",
        "dies",
        "handed_over",
        "name",
        "nbytes",
        "raw_nbytes",
        "row",
        "saved",
        "stream",
    )

    def __init__(self, row: str, name: str, raw_nbytes: int, born: int) -> None:
        self.row = row
        self.name = name
        self.nbytes = -(-raw_nbytes // ALIGNMENT) * ALIGNMENT
        self.raw_nbytes = raw_nbytes
        self.born = born
        self.dies = NEVER
        self.saved = False
        self.handed_over = False
        self.aliased = False
        self.card = 0
        self.stream = 0


OUTSIDE_MODULES = "loss outside the model"
"""The part of what no module allocates: what a trainer makes of outputs, as log-probabilities and their loss."""


class Tape:
    """Records one forward and backward pass (or one generation step) of a model on shapes alone."""

    def __init__(self, phase: str = "forward", *, sum_out_of_place: bool = False) -> None:  # noqa: PLR0915 attributes with what they are
        self.clock = 0
        self.allocations: list[Allocation] = []
        self.inputs: list[Allocation] = []
        """Token ids, labels and masks of the step. PyTorch's trackers see one only once a view of it is made."""
        self.buffers: list[tuple[Allocation, int]] = []
        """Buffers of the model, each with its copies: unlike parameters they count as saved where one is kept."""
        self.spans: list[Span] = []
        self.phase = phase
        self.block: TracedBlock | None = None
        self.scope = OUTSIDE_MODULES
        self.card = 0
        """The GPU that runs now, where one process uses several (`device_map`)."""
        self.sequence = 0
        """Sequence number of the next autograd node; the engine runs the largest first."""
        self.grad_enabled = True
        self.dropout_enabled = True
        """Apply dropout: in training, unless a trainer switches it off (`disable_dropout` of TRL)."""
        self.ring: Ring | None = None
        """The ranks that share every sequence (context parallel)."""
        self.autocast: DType | None = None
        self.cast_cache: dict[int, Tensor] = {}
        """The 16-bit copies of weights that an autocast context keeps, by identity of the weight."""
        self.checkpoint: CheckpointFrame | None = None
        """The frame that takes what is saved now, while a checkpointed block runs."""
        self.offloading = False
        """Offload what is saved for backward to host memory."""
        self.last_output: Allocation | None = None
        """The first output of the last recorded operation; set only while saved tensors are offloaded."""
        self.offloads_inputs = False
        """Offload the inputs of checkpointed blocks to host memory."""
        self.turns = 1
        """How many turns of a loop the one that runs now stands for."""
        self.host_bytes = 0
        """Bytes of host memory that hold saved tensors, all blocks of the model included."""
        self.leaves: list[Tensor] = []
        """Tensors without a node of their own that ask for a gradient: the graph holds them as long as it lasts."""
        self.kept_by_graph: list[object] = []
        """What the graph keeps alive besides saved tensors (leaves, attributes of functions) until the loss goes."""
        self.casts_outlast_step = False
        """Keep the 16-bit copies of autocast through many micro-batches: they stand outside the tape."""
        self.casts_precede = False
        """Those copies were made in the forward of an earlier micro-batch."""
        self.standing_casts = 0
        """Bytes of those copies, all blocks of the model included."""
        self.last_autocast: DType | None = None
        """The dtype of the last autocast context."""
        self.sent: dict[tuple[str, bool], int] = {}
        """Bytes that this rank sends, all blocks of the model included, by collective and by whether only the last
        micro-batch of a step sends them."""
        self.shards_logits = False
        """Logits are this rank's columns alone, and the loss is computed of them (`loss_parallel`)."""
        self.keeps_linear_inputs = False
        """Save the inputs of linear layers even where their weights are frozen, as DeepSpeed's own function does."""
        self.final_callbacks: list[Callable[[], None]] = []
        """What runs at the end of backward, while its root gradient still lives (`queue_callback`)."""
        self.after_backward: list[Callable[[], None]] = []
        """What the loop's library runs once backward is through."""
        self.device: CudaDevice | None = None
        """The GPU whose kernels run: what they allocate themselves is on the tape too. None leaves it out."""
        self.multiplied: dict[str, int] = {}
        """The tick of the first product in each phase: once it is allocated, cuBLAS asks for its workspace."""
        self.sum_out_of_place = sum_out_of_place
        """Sum gradients of one tensor into a new tensor, as under PyTorch's trackers (tests only)."""
        self.run: object = None
        """How the forward pass is run, for the modules that know (`memcalc.nn.run_context`)."""
        self._mark()

    # -- memory ---------------------------------------------------------------------------------------------------

    def allocate(self, nbytes: int, row: str = TEMPORARY, name: str | None = None, stream: int = 0) -> Storage:
        """New device memory of `nbytes` bytes."""
        allocation = Allocation(row, name or self.scope, nbytes, self.clock)
        allocation.card = self.card
        allocation.stream = stream
        self.allocations.append(allocation)
        self.clock += 1
        return Storage(self, allocation)

    def release(self, nbytes: int, row: str, name: str) -> None:
        """Free `nbytes` bytes that stood before the tape started, as an allocation of less than nothing."""
        self.keep(self.allocate(-nbytes, row, name))

    def keep(self, storage: Storage) -> None:
        """Let what was allocated outlive the tape, whatever happens to `storage`."""
        storage.allocation = Allocation(storage.allocation.row, storage.allocation.name, 0, BEFORE)

    def send(self, collective: str, nbytes: int, *, last: bool = False) -> None:
        """Note that this rank sends `nbytes` bytes here, in every block that the traced one answers for."""
        copies = 1 if self.block is None else self.block.copies
        self.sent[collective, last] = self.sent.get((collective, last), 0) + nbytes * copies

    def undo_last(self) -> None:
        """Remove the last allocation: the operation that it was made for does not run."""
        self.allocations.pop()
        self.clock -= 1

    def empty(self, shape: Shape, dtype: DType, stride: Shape | None = None) -> Tensor:
        """A new tensor outside the graph (torch.empty, or empty_strided with `stride`)."""
        storage = self.allocate(prod(shape) * dtype.itemsize)
        return Tensor(shape, stride or contiguous_stride(shape), dtype, storage)

    def reduce(self, x: Tensor, dims: Collection[int]) -> None:
        """Allocate and free what a sum of `x` over `dims` works in, where the device is known."""
        if self.device is not None:
            from memcalc.autograd.reduce_kernel import reduce_scratch  # only a known device pays for it

            scratch = reduce_scratch(x.shape, x.stride, dims, self.device)
            if scratch is not None:
                held = self.allocate(scratch.buffer), self.allocate(scratch.semaphores)
                del held

    def external_tensor(self, shape: Shape, dtype: DType, row: str, name: str) -> Tensor:
        """A tensor that exists before the tape starts: a weight, or an input of the step (row OVERHEAD)."""
        allocation = Allocation(row, name, prod(shape) * dtype.itemsize, BEFORE)
        if row is OVERHEAD:
            self.inputs.append(allocation)
        return Tensor(shape, contiguous_stride(shape), dtype, Storage(self, allocation))

    def scale_live(self, born: range, count: int) -> None:
        """Multiply by `count` the size of allocations of the ticks `born` that are still alive.

        A loop over tokens is traced for one token that stands for many.
        """
        for allocation in self.allocations[born.start : born.stop]:
            if allocation.dies == NEVER:
                allocation.nbytes *= count
                allocation.raw_nbytes *= count

    @contextmanager
    def standing_for(self, count: int) -> Iterator[None]:
        """Run one turn of a loop for `count` of them: what it leaves alive is that of all."""
        since, before, self.turns = self.clock, self.turns, self.turns * count
        try:
            yield
        finally:
            self.turns = before
        self.scale_live(range(since, self.clock), count)

    # -- where we are -----------------------------------------------------------------------------------------------

    def _mark(self) -> None:
        if self.spans:
            self.spans[-1].end = self.clock
        self.spans.append(Span(self.phase, self.block, self.clock))

    def begin_span(self, phase: str, block: TracedBlock | None) -> None:
        """Begin a new span: from here on, allocations belong to `phase` and `block` (None: between blocks)."""
        if phase != self.phase or block is not self.block:
            self.phase, self.block = phase, block
            self._mark()

    def finish(self) -> None:
        """Close the last span."""
        self.spans[-1].end = self.clock

    @contextmanager
    def scoped(self, scope: str) -> Iterator[None]:
        """Allocations made inside belong to the part `scope` of their row in the box."""
        before, self.scope = self.scope, scope
        try:
            yield
        finally:
            self.scope = before

    @contextmanager
    def no_grad(self) -> Iterator[None]:
        """Run outside the graph (torch.no_grad)."""
        before, self.grad_enabled = self.grad_enabled, False
        try:
            yield
        finally:
            self.grad_enabled = before

    @contextmanager
    def without_offloading(self) -> Iterator[None]:
        """Tensors saved inside stay on the device."""
        before, self.offloading = self.offloading, False
        try:
            yield
        finally:
            self.offloading = before

    @contextmanager
    def autocasting(self, dtype: DType | None) -> Iterator[None]:
        """Run inside `torch.autocast` to `dtype` (None: no autocast). The cast weights go when the context exits."""
        before, self.autocast = self.autocast, dtype
        self.last_autocast = dtype or self.last_autocast
        try:
            yield
        finally:
            self.autocast = before
            if before is None:
                self.cast_cache.clear()
