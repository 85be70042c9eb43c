"""Megatron-Core's data parallel with its distributed optimizer.

Source: megatron/core/distributed/param_and_grad_buffer.py, optimizer/distrib_optimizer.py of Megatron-Core 0.16 and
docs/user-guide/features/dist_optimizer.md of Megatron-LM.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from math import lcm

from memcalc.autograd.graph import AccumulateGrad
from memcalc.autograd.tape import Tape
from memcalc.common.sizes import rounded
from memcalc.nn import parameter_bytes
from memcalc.nn.module import Parameter
from memcalc.optim.weight import SCALAR, Weight
from memcalc.parallel import traffic
from memcalc.parallel.engine import Engine, Job, Part, in_model_order, leaf
from memcalc.parallel.megatron_model import GPTModel
from memcalc.tables.dtypes import short

PARAMETER_START = 64
"""Elements to a multiple of which each weight begins in the buffer."""
BUCKET_END = 128
"""Elements of which, and of the ranks, a bucket's end is a common multiple."""
MAIN = 4
"""Bytes of an element of the fp32 gradients and of the fp32 weights that are stepped."""


class Megatron(Engine):
    """One rank: 16-bit weights and fp32 gradients in buffers made once, states over the data-parallel ranks."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.ranks = job.layout.shards
        trained = {id(p) for p in self.parameters if leaf(p) is not None}
        self.places: list[tuple[int, int, bool]] = []
        """Where each weight begins and ends in the buffer, in the order of backward, and whether it decays."""
        end = 0
        for parameter in reversed([p for p in in_model_order(job.network, set()) if id(p) in trained]):
            start = end + -end % PARAMETER_START
            end = start + parameter.numel
            self.places.append((start, end, len(parameter.shape) > 1))
        unit = lcm(self.ranks, BUCKET_END)
        self.elements = -(-end // unit) * unit
        self.dtype = self.parameters[0].dtype if self.parameters else job.compute

    def attach(self, tape: Tape) -> None:
        """Let every fresh gradient be added to the buffer, and go."""
        self.tape = tape
        for parameter in self.parameters:
            node = leaf(parameter)
            if node is not None:
                node.post_accumulate_hook = partial(self._added)

    @staticmethod
    def _added(node: AccumulateGrad) -> None:
        node.gradient = None

    def backward_over(self) -> None:
        """Gradients are reduce-scattered in their buffer, and weights gathered in theirs."""
        traffic.scatter(self.tape, self.elements * MAIN, self.ranks)
        whole = self.elements * self.dtype.itemsize
        self.tape.send(traffic.ALL_GATHER, whole * (self.ranks - 1) // self.ranks, last=True)

    def weights(self) -> Iterator[Part]:
        """The buffer of the weights, and the buffers of the model."""
        yield f"{short(self.dtype)} weight buffer", rounded(self.elements * self.dtype.itemsize)
        yield from parameter_bytes.by_label(self.buffers_of_model).items()

    def _own(self) -> Iterator[tuple[int, bool]]:
        """Elements of each weight, or part of one, in the first rank's part of the buffer, and whether it decays."""
        share = self.elements // self.ranks
        for start, end, decays in self.places:
            if start < share:
                yield min(end, share) - start, decays

    def states(self) -> Iterator[Part]:
        """This rank's part of the fp32 weights: a tensor for each weight in it. The loss scale is a scalar."""
        yield "fp32 master weights", sum(rounded(elements * MAIN) for elements, _ in self._own())
        yield "loss scale", SCALAR

    def gradients(self, phase: str, scratch: int = 0) -> Iterator[Part]:
        """All of them in fp32, at all times."""
        yield "fp32 gradient buffer", rounded(self.elements * MAIN)

    def buffers(self, phase: str) -> Iterator[Part]:
        """What the ranks gather their parts of a sequence in."""
        network = self.job.network
        if isinstance(network, GPTModel) and network.ranks.gathered:
            yield "gathered sequence (tensor parallel)", rounded(network.ranks.gathered)

    def updated(self, weights: Sequence[tuple[Parameter, Weight]]) -> tuple[Weight, ...]:
        """This rank's part of the buffer."""
        if not weights:
            return ()
        return tuple(
            replace(weights[0][1], shape=(elements,), itemsize=MAIN, copies=1, group="decays" if decays else "as it is")
            for elements, decays in self._own()
        )

    def parameter_groups(self, weights: Sequence[Weight]) -> list[Sequence[Weight]]:
        """Norms and biases do not decay, and are a group of their own."""
        groups = [[weight for weight in weights if weight.group == name] for name in ("decays", "as it is")]
        return [group for group in groups if group] or [()]
