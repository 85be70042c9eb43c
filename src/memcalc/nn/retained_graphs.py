"""Tensors that modules store as attributes (recurrent states) survive the step, together with everything their autograd
graph has saved.

Backward frees what the nodes that it runs have saved. A graph that it never runs (of a checkpointed block that was run
again only for its saved tensors) stays whole as long as something refers to its output.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from memcalc.autograd.graph import Node
from memcalc.autograd.tape import ACTIVATIONS, BEFORE, Allocation, Tape
from memcalc.autograd.tensor import Storage, Tensor
from memcalc.nn.module import Module
from memcalc.nn.stack import Stack

if TYPE_CHECKING:
    from memcalc.nn.model import Network

NAME = "retained module states"


class RetainingModule(Module):
    """A module that stores a tensor as an attribute from one forward to the next."""

    state: Tensor | None = None
    retained_bytes: int = 0
    """Bytes that this module's state and its graph held after the previous step."""
    _old: Storage | None = None

    def clear(self) -> None:
        """Drop the stored tensors."""
        self.state = self._old = None

    def restore_retained(self, tape: Tape) -> None:
        """Allocate what the previous step retained."""
        self._old = tape.allocate(self.retained_bytes, ACTIVATIONS, NAME)


def restore_retained(network: Network, tape: Tape) -> None:
    """Allocate what the previous step retained, for each block in a span of its own: its forward releases it."""
    phase = tape.phase
    for _, stack in network.modules():
        for block in stack if isinstance(stack, Stack) else ():
            for _, module in block.module.modules():
                if isinstance(module, RetainingModule):
                    tape.begin_span("retained", block.traced)
                    module.restore_retained(tape)
    tape.begin_span(phase, None)


def retaining_modules(network: Network) -> list[RetainingModule]:
    """The modules of a network that store a tensor."""
    return [module for module in network.all_modules if isinstance(module, RetainingModule)]


def record_retained(modules: list[RetainingModule]) -> int:
    """Record in each module what it retains after a step; returns the bytes of all, untraced blocks included."""
    for module in modules:
        module.retained_bytes = sum(allocation.nbytes for allocation in _reached(module.state)) if module.state else 0
    return sum(module.retained_bytes * module.copies for module in modules)


def _reached(kept: Tensor) -> Iterator[Allocation]:
    """The memory of a tensor and of what its graph has saved, weights excepted."""
    waiting = [] if kept.node is None else [kept.node]
    seen: dict[int, Node] = {}
    found = {id(kept.storage): kept.storage}
    while waiting:
        node = waiting.pop()
        if id(node) not in seen:
            seen[id(node)] = node
            waiting.extend(edge[0] for edge in node.edges if edge is not None)
            found.update((id(saved), saved) for saved in node.saved if isinstance(saved, Storage))
    allocations = {id(storage.allocation): storage.allocation for storage in found.values()}
    return (allocation for allocation in allocations.values() if allocation.born != BEFORE)
