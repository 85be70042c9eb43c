"""What a step leaves behind in modules that keep a tensor after their forward, with what hangs on its graph.

Backward lets go of what the nodes that it ran had saved. A graph that it never runs (that of a checkpointed block, run
again for its saved tensors alone) stays whole as long as something refers to its end.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from memcalc.autograd.graph import Node
from memcalc.autograd.tape import ACTIVATIONS, BEFORE, Allocation, Tape
from memcalc.autograd.tensor import Storage, Tensor
from memcalc.nn.module import Module

if TYPE_CHECKING:
    from memcalc.nn.model import Network

NAME = "states that modules keep"


class Keeper(Module):
    """A module that keeps a tensor from one forward to the next."""

    state: Tensor | None = None
    left: int = 0
    """Bytes that the step before left here."""
    _old: Storage | None = None

    def forget(self) -> None:
        """Let go of what was kept."""
        self.state = self._old = None

    def inherit(self, tape: Tape) -> list[Storage]:
        """Take what the step before left; returns the same for the modules that this one stands for."""
        alike = [tape.allocate(self.left, ACTIVATIONS, NAME) for _ in range(self.copies)]
        self._old = alike.pop()
        return alike


def keepers(network: Network) -> list[Keeper]:
    """The modules of a network that keep a tensor."""
    return [module for module in network.parts if isinstance(module, Keeper)]


def look_back(modules: list[Keeper]) -> int:
    """Note in each module what a step has left there; returns the bytes of all, those not traced included."""
    for module in modules:
        module.left = sum(allocation.nbytes for allocation in _reached(module.state)) if module.state else 0
    return sum(module.left * module.copies for module in modules)


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
