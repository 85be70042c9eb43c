"""DistributedDataParallel: one GPU, and buckets that hold every trained gradient once more.

Source: torch/nn/parallel/distributed.py and torch/csrc/distributed/c10d/reducer.cpp of PyTorch 2.14.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import groupby

from memcalc import ops
from memcalc.autograd.graph import AccumulateGrad
from memcalc.autograd.spans import TracedBlock
from memcalc.autograd.tape import GRADIENTS, Tape
from memcalc.common.sizes import rounded
from memcalc.nn.model import Batch, Network, Outputs
from memcalc.nn.module import Parameter
from memcalc.parallel import traffic
from memcalc.parallel.engine import Engine, Job, Part, in_model_order, leaf
from memcalc.tables.dtypes import INT32

MIB = 1 << 20
BUCKET = 25
"""MiB of a bucket (`bucket_cap_mb`)."""
FIRST_BUCKET = 1
"""MiB of the first bucket where nobody chose a size (`_DEFAULT_FIRST_BUCKET_BYTES`)."""


class DistributedDataParallel(Engine):
    """One rank of DDP. How many ranks there are changes no byte."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.trained = [parameter for parameter in self.parameters if leaf(parameter) is not None]
        self._arrivals: list[tuple[TracedBlock | None, Parameter]] = []

    def attach(self, tape: Tape) -> None:
        """Let every trained weight tell when its gradient is there."""
        if self.layout.accelerate or self.layout.find_unused_parameters:
            self.job.network.hooks = self.run_root
        for parameter in self.trained:
            node = leaf(parameter)
            assert node is not None
            node.post_accumulate_hook = partial(self._arrived, parameter)

    def run_root(self, network: Network, batch: Batch) -> Outputs:
        """What the model gives; to find unused parameters DDP passes it through a function that copies it."""
        outputs = super().run_root(network, batch)
        if self.layout.find_unused_parameters:
            outputs.replace(ops.clone)
        return outputs

    def _arrived(self, parameter: Parameter, node: AccumulateGrad) -> None:
        tape = node.tape
        self._arrivals.append((tape.block, parameter))
        traffic.reduce(tape, parameter.numel * parameter.dtype.itemsize, self.layout.data, last=True)
        if self.layout.gradient_as_bucket_view:  # the gradient was copied: from here on it is a view of the bucket
            node.gradient = None
            if self.job.accumulates and not self.layout.sync_every_micro_step:
                nbytes = rounded(parameter.numel * parameter.dtype.itemsize)
                tape.release(nbytes, GRADIENTS, "gradients of trained weights")

    def gradients(self, phase: str, scratch: int = 0) -> Iterator[Part]:
        """As on one GPU, but with `gradient_as_bucket_view` they lie in the buckets once these are full."""
        in_buckets = self.layout.gradient_as_bucket_view
        if in_buckets and (phase in ("clip", "step") or self.layout.sync_every_micro_step):
            return
        yield from super().gradients(phase, scratch)

    def buffers(self, phase: str) -> Iterator[Part]:
        """The buckets, from construction to the end, and what tells which parameters took part."""
        if self.trained:
            yield "gradient buckets (DDP)", sum(map(rounded, self.buckets()))
        if self.layout.find_unused_parameters or self.layout.static_graph:
            count = sum(parameter.copies for parameter in self.trained)
            yield "map of used parameters (DDP)", rounded(count * INT32.itemsize)

    def buckets(self) -> list[int]:
        """Bytes of each bucket in the order in which they are reduced.

        Sorted by the order in which gradients became ready, but with `find_unused_parameters` by that of the
        parameters, backwards. A bucket is closed once it has reached its size.
        """
        chosen = self.layout.bucket_mb
        limits = [(FIRST_BUCKET if chosen is None else chosen) * MIB, (chosen or BUCKET) * MIB]
        sizes: dict[str, list[int]] = {}
        closed: list[int] = []
        for parameter in self._order():
            waiting = sizes.setdefault(parameter.dtype.name, [0, 0])
            waiting[0] += parameter.numel * parameter.dtype.itemsize
            if waiting[0] >= limits[min(waiting[1], 1)]:
                closed.append(waiting[0])
                waiting[0], waiting[1] = 0, waiting[1] + 1
        return [*closed, *(waiting for waiting, _ in sizes.values() if waiting)]

    @property
    def rebuilds(self) -> bool:
        """Whether buckets are made again for the second step: until then one of each dtype holds all gradients."""
        return not self.layout.find_unused_parameters

    def first_buckets(self) -> list[int]:
        """Bytes of each bucket of the first step."""
        if not self.rebuilds:
            return self.buckets()
        sizes: dict[str, int] = {}
        for parameter in self.trained:
            nbytes = parameter.numel * parameter.copies * parameter.dtype.itemsize
            sizes[parameter.dtype.name] = sizes.get(parameter.dtype.name, 0) + nbytes
        return [*sizes.values()]

    def _order(self) -> Iterator[Parameter]:
        if self.layout.find_unused_parameters:
            trained = {id(parameter) for parameter in self.trained}
            everything = list(in_model_order(self.job.network, set()))
            yield from (parameter for parameter in reversed(everything) if id(parameter) in trained)
            return
        for stack, run in groupby(self._arrivals, key=lambda item: item[0] and item[0].stack):
            if stack is None:
                yield from (parameter for _, parameter in run)
                continue
            by_block: dict[int, tuple[TracedBlock, list[Parameter]]] = {}
            for block, parameter in run:
                assert block is not None
                by_block.setdefault(id(block), (block, []))[1].append(parameter)
            places = [(position, own) for block, own in by_block.values() for position in block.positions]
            for _, own in sorted(places, key=lambda place: -place[0]):
                yield from own
