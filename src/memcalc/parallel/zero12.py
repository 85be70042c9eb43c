"""DeepSpeed ZeRO stages 1 and 2: whole weights in one flat tensor, a partition of master weights and states.

Source: deepspeed/runtime/zero/stage_1_and_2.py of DeepSpeed 0.19.6; the names are its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from memcalc.autograd.graph import AccumulateGrad
from memcalc.autograd.tape import GRADIENTS, OVERHEAD, Tape
from memcalc.autograd.tensor import Storage
from memcalc.common.sizes import rounded
from memcalc.nn import parameter_bytes
from memcalc.nn.module import Parameter
from memcalc.optim.weight import SCALAR, Scratch, Weight
from memcalc.parallel import traffic
from memcalc.parallel.engine import Engine, Job, Part, in_model_order, leaf
from memcalc.parallel.zero_bucket import LOSSES, Bucket, Memory, Partition
from memcalc.tables.dtypes import FP32, short

BUCKET = "reduce buckets (ZeRO)"
NORMS = "gradient norms (ZeRO)"
OWN = "gradients of this rank's partition"
MASTER = 4
"""Bytes of an element of the fp32 partition."""


class TapeMemory:
    """Memory of a bucket on a tape."""

    def __init__(self, tape: Tape) -> None:
        self.tape = tape

    def new(self, nbytes: int, stream: int = 0) -> Storage:
        """A piece of `nbytes` bytes on a stream."""
        return self.tape.allocate(nbytes, OVERHEAD, BUCKET, stream)


class ZeroOneTwo(Engine):
    """Rank 0 of stages 1 and 2: the one that owns the beginning of the flat weights, the embedding among it."""

    LOSSES = LOSSES

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.partitions_gradients = job.layout.engine == "zero2"
        self.options = job.layout.zero
        self.overlap = bool(self.options.overlap_comm)
        self.offloads = "optimizer" in job.layout.offload
        self.reduces_afterwards = not (self.partitions_gradients or self.overlap)
        trained = {id(p) for p in self.parameters if leaf(p) is not None}
        self.flat = [p for p in in_model_order(job.network, set()) if id(p) in trained]
        self.dtype = self.flat[0].dtype if self.flat else job.compute
        self.partition = Partition([p.numel for p in self.flat], job.layout.shards, self.options.round_robin_gradients)
        self.indices: dict[int, list[int]] = {}
        for index, parameter in enumerate(self.flat):
            self.indices.setdefault(id(parameter), []).append(index)
        self.bucket: Bucket | None = None

    # -- backward -------------------------------------------------------------------------------------------------

    def attach(self, tape: Tape) -> None:
        """Let every trained weight tell when its gradient is there."""
        self.tape = tape
        for parameter in self.parameters:
            node = leaf(parameter)
            if node is not None:
                node.post_accumulate_hook = partial(self._arrived, parameter)

    def _new_bucket(self, memory: Memory) -> Bucket:
        return Bucket(
            memory,
            self.partition,
            self.options,
            self.dtype.itemsize,
            overlap=self.overlap,
            clears=self.partitions_gradients,
            offloads=self.offloads,
            widens=self.layout.ulysses,
        )

    def _arrived(self, parameter: Parameter, node: AccumulateGrad) -> None:
        if self.bucket is None:
            self.bucket = self._new_bucket(TapeMemory(self.tape))
            if not (self.job.accumulates and not self.partitions_gradients):
                self.bucket.allocate(self.options.reduce_bucket_size)
        if not (self.partitions_gradients or self.overlap):
            return
        places = self.indices[id(parameter)]
        index = places.pop() if len(places) > 1 else places[0]
        gradient, node.gradient = node.gradient, None
        assert gradient is not None
        held: list[object] = [gradient.storage]
        del gradient
        if self.job.accumulates and not self.partitions_gradients:
            self.tape.release(rounded(parameter.numel * self.dtype.itemsize), GRADIENTS, "gradients of trained weights")
        self.bucket.ready(index, held)

    def backward_over(self) -> None:
        """The epilogue: reduce what waits; without overlap stage 1 reduces everything only now."""
        whole = self.partition.padded * self.dtype.itemsize
        traffic.reduce(self.tape, whole, self.layout.shards, last=not self.partitions_gradients)
        self.tape.send(traffic.ALL_GATHER, whole * (self.layout.shards - 1) // self.layout.shards, last=True)
        if self.bucket is None:
            return
        one_by_one = all(parameter.copies == 1 for parameter in self.flat) and not self.job.accumulates
        if one_by_one and self.reduces_afterwards:
            self._hand_over()
        if one_by_one or not self.reduces_afterwards:
            self.bucket.reduce()
            own = self.bucket.direct_tensors
            self.bucket = None
            if own is None and self.partition.own_elements and not self.offloads:
                own = TapeMemory(self.tape).new(self.own_bytes)
            if isinstance(own, Storage) and not (self.job.accumulates and self.partitions_gradients):
                own.allocation.row, own.allocation.name = GRADIENTS, OWN
                self.held.append(own.allocation)
                self.tape.keep(own)
            return
        self._reduce_all()

    def _hand_over(self) -> None:
        """Give the bucket the gradients of all weights in order, as stage 1 does when backward is through."""
        assert self.bucket is not None
        for index, parameter in enumerate(self.flat):
            node = leaf(parameter)
            if node is not None and node.gradient is not None:
                held: list[object] = [node.gradient.storage]
                node.gradient = None
                self.bucket.ready(index, held)

    @property
    def own_bytes(self) -> int:
        """Bytes of the gradients of all weights that touch this rank's partition."""
        return rounded(self.partition.own_elements * self.dtype.itemsize)

    def _reduce_all(self) -> None:
        """Stage 1's reduction, in the order of the weights, computed apart: its highest point goes on the tape."""
        scratch = Scratch()
        grads = [[scratch.new(rounded(n * self.dtype.itemsize))] for n in self.partition.numels]
        before = scratch.live
        scratch.peak = 0
        bucket = self._new_bucket(scratch)
        for index, held in enumerate(grads):
            mine: list[object] = [held.pop()]
            bucket.ready(index, mine)
            del mine
        bucket.reduce()
        highest = scratch.peak - before
        tape = self.tape
        if highest > 0:
            moment = tape.allocate(highest, OVERHEAD, BUCKET)
            del moment
        for parameter in self.parameters:
            node = leaf(parameter)
            if node is not None:
                node.gradient = None
        if self.job.accumulates:
            standing = sum(rounded(n * self.dtype.itemsize) for n in self.partition.numels)
            tape.release(standing, GRADIENTS, "gradients of trained weights")
            tape.release(self._bucket_bytes(), OVERHEAD, BUCKET)
        self.bucket = None
        if self.partition.own_elements and not self.offloads:
            own = tape.allocate(self.own_bytes, GRADIENTS, OWN)
            self.held.append(own.allocation)
            tape.keep(own)

    def _bucket_bytes(self) -> int:
        one = rounded(self.options.reduce_bucket_size * self.dtype.itemsize)
        return (2 if self.overlap else 1) * one if self.options.contiguous_gradients else 0

    # -- what stands ----------------------------------------------------------------------------------------------

    def weights(self) -> Iterator[Part]:
        """One flat tensor of the trained weights; frozen ones and buffers as they are."""
        if self.flat:
            yield f"{short(self.dtype)} flat weights", rounded(self.partition.padded * self.dtype.itemsize)
        trained = set(self.indices)
        yield from parameter_bytes.by_label(value for _, value in self.job.tensors if id(value) not in trained).items()

    def states(self) -> Iterator[Part]:
        """The fp32 master weights of this rank's partition."""
        if self.flat and not self.offloads:
            yield "fp32 master weights", rounded(self.partition.size * MASTER)

    def buffers(self, phase: str) -> Iterator[Part]:
        """What optimizer offload copies gradients through, and a bucket that waits for the last micro-batch."""
        if self.offloads and self.flat:
            yield "gradient buffer (offload)", rounded(max(self.partition.numels) * self.dtype.itemsize)
            if phase == "step":
                yield NORMS, SCALAR * (len(self.partition.direct_tensors) + 1)
        elif self.flat:
            yield NORMS, SCALAR  # `_global_grad_norm` of the step before
        if phase == "backward":
            yield "scaled loss", LOSSES * SCALAR
        if phase in ("forward", "backward") and self.job.accumulates and not self.partitions_gradients:
            yield BUCKET, self._bucket_bytes()

    def gradients(self, phase: str, scratch: int = 0) -> Iterator[Part]:
        """Stage 1 keeps whole gradients until the last micro-batch, stage 2 those of its partition."""
        if phase == "step":
            if self._worst(scratch)[1]:
                yield OWN, self.own_bytes
        elif self.job.accumulates and self.partitions_gradients:
            yield OWN, 0 if self.offloads else self.own_bytes
        elif self.job.accumulates:
            standing = sum(rounded(n * self.dtype.itemsize) for n in self.partition.numels)
            yield "gradients of trained weights", standing

    def _worst(self, scratch: int) -> tuple[int, bool]:
        """The most that the step has alive besides, and whether that is before the 16-bit gradients go."""
        if self.offloads or not self.flat:
            return 0, False
        pieces = self.partition.pieces
        norms = max(SCALAR * (index + 1) + rounded(8 * piece) for index, piece in enumerate(pieces))
        flat = rounded(self.partition.size * self.dtype.itemsize) if len(pieces) > 1 else 0
        master = rounded(self.partition.size * MASTER)
        totals = 2 * SCALAR  # the norm of all gradients, scaled and not
        early = max(norms, totals + flat + (master if self.dtype is not FP32 else 0))
        late = totals + (flat if self.dtype is FP32 else master) + scratch
        return (early, True) if early + self.own_bytes >= late else (late, False)

    def temporaries(self, phase: str, step: Part) -> Iterator[Part]:
        """The gradient norm in fp64, then the gradients flattened and cast, then the optimizer."""
        if phase != "step":
            return
        worst, early = self._worst(step[1])
        if early:
            yield "gradient norms or fp32 gradients (ZeRO)", worst
        else:
            yield "fp32 gradients (ZeRO)", worst - step[1]
            yield step

    def updated(self, weights: Sequence[tuple[Parameter, Weight]]) -> tuple[Weight, ...]:
        """One flat fp32 tensor."""
        if self.offloads or not weights:
            return ()
        return (replace(weights[0][1], shape=(self.partition.size,), itemsize=MASTER, copies=1, group="partition"),)

    def host(self) -> Iterator[Part]:
        """Master weights, their gradients, a 16-bit copy and a gradient buffer, pinned; states in plain memory."""
        if self.offloads and self.flat:
            size = self.partition.size
            yield "fp32 master weights (pinned)", size * MASTER
            yield "fp32 gradients (pinned)", size * MASTER
            yield f"{short(self.dtype)} weights (pinned)", size * self.dtype.itemsize
            yield "gradient buffer (pinned)", max(self.partition.numels) * self.dtype.itemsize
            yield "optimizer states", 2 * size * MASTER
