"""Why memory is alive: which node, gradient, cache or local variable refers to it at the moment that is looked at."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from types import FrameType, FunctionType, ModuleType
from typing import Any

from memcalc.autograd.checkpointing import _KeptInput
from memcalc.autograd.graph import AccumulateGrad, CheckpointSlot, Node
from memcalc.autograd.tape import Tape
from memcalc.autograd.tensor import Storage, Tensor
from memcalc.common.sizes import Shape
from memcalc.nn.kv_cache import Cache
from memcalc.nn.module import Module
from memcalc.provenance.origins import NOWHERE, ModulePath, RecordingTape, Scope, parameter_paths
from memcalc.tables.dtypes import DType

_DEEPEST = 6
"""How far a local variable is followed through containers."""


@dataclass(frozen=True)
class Reason:
    """A reason to be alive: a sentence with the place of a module in it."""

    text: str
    module: ModulePath = NOWHERE

    def said_in(self, block: int | None) -> str:
        """The sentence, as said of something in block `block`."""
        return self.text.replace("<module>", self.module.beside(block))


@dataclass
class References:
    """What refers to memory at one moment, by number of the allocation's birth."""

    reasons: dict[int, list[Reason]] = field(default_factory=dict)
    layouts: dict[int, tuple[Shape, DType]] = field(default_factory=dict)

    def look(self, tape: RecordingTape, networks: Iterable[Module]) -> None:
        """Note every reference to the tape's memory. Local variables are read: the run must not go on."""
        paths: dict[int, ModulePath] = {}
        for network in networks:
            paths |= _gradient_paths(network)
        found = [item for item in gc.get_objects() if type(item) in _HOLDERS and item.tape is tape]
        for reason, thing in (*_graph(found, paths), *_containers(tape, found), *_locals(tape, sys._getframe(1))):
            storage = thing.storage if isinstance(thing, Tensor) else thing
            birth = tape.birth(storage.allocation)
            if birth is None:
                continue
            have = self.reasons.setdefault(birth.number, [])
            if reason not in have:
                have.append(reason)
            if isinstance(thing, Tensor) and thing.numel * thing.dtype.itemsize == storage.allocation.raw_nbytes:
                self.layouts.setdefault(birth.number, (thing.shape, thing.dtype))


def _gradient_paths(network: Module) -> dict[int, ModulePath]:
    """Paths of the weights, by identity of the node that takes their gradient."""
    paths = parameter_paths(network)
    return {id(value.node): paths[id(value)] for _, value in network.tensors() if value.node is not None}


Found = Iterator[tuple[Reason, Storage | Tensor]]


_HOLDERS = frozenset({Node, AccumulateGrad, _KeptInput})
"""Kinds of objects that keep tensors beside local variables and containers."""


def _graph(found: Iterable[Any], paths: dict[int, ModulePath]) -> Found:
    """What nodes hold: gradients of weights, saved tensors, and gradients that wait."""
    nodes = sorted((item for item in found if isinstance(item, Node)), key=lambda node: node.sequence)
    for node in nodes:
        if isinstance(node, AccumulateGrad) and node.gradient is not None:
            if id(node) in paths:
                reason = Reason("gradient of <module>, kept until the optimizer has stepped", paths[id(node)])
                yield reason, node.gradient
            else:
                yield Reason("gradient of a leaf, kept as long as the graph"), node.gradient
    for node in nodes:
        for item in (*node.saved, *node.unpacked):
            storage = item.storage if isinstance(item, CheckpointSlot) else item
            if isinstance(storage, Storage):
                yield _of(node, "saved by {} for backward"), storage
    for node in nodes:
        for gradient in node.received or ():
            if gradient is not None:
                yield _of(node, "gradient that waits for the backward of {}"), gradient


def _of(node: Node, sentence: str) -> Reason:
    if not isinstance(node.scope, Scope):
        return Reason(sentence.format(node.scope))
    origin = node.scope.origin
    where = " of <module>" if origin.module.template else f" ({node.scope})"
    return Reason(sentence.format(origin.operation + where), origin.module)


def _containers(tape: RecordingTape, found: Iterable[Any]) -> Found:
    """What lasts beside the graph: inputs of checkpointed blocks, autocast's copies, caches, states of modules."""
    for item in found:
        if isinstance(item, _KeptInput) and item.tensor is not None:
            yield Reason("input of a checkpointed block, kept to run it again"), item.tensor
    for cast in tape.cast_cache.values():
        yield Reason("16-bit copy of a weight, kept until the autocast context exits"), cast
    cache = getattr(tape.run, "cache", None)
    if isinstance(cache, Cache):
        for thing in _reached(cache, _DEEPEST):
            yield Reason("in the cache, which generation keeps"), thing
    for thing in _reached(tape.kept_by_graph, _DEEPEST):
        yield Reason("kept by the graph until the loss goes"), thing


def _locals(tape: Tape, frame: FrameType | None) -> Found:
    """What local variables of the running functions refer to, the innermost first."""
    frames = []
    while frame is not None:
        inside = str(frame.f_globals.get("__name__", ""))
        if inside.startswith("memcalc.") and not inside.startswith("memcalc.provenance"):
            frames.append((inside, frame))
        frame = frame.f_back
    for inside, running in sorted(frames, key=lambda pair: pair[0].startswith(_PLUMBING)):
        owner = running.f_code.co_qualname.rpartition(".<locals>.")[2]
        for name, value in list(running.f_locals.items()):
            for thing in _reached(value, _DEEPEST):
                if thing.tape is tape:
                    yield Reason(_held(inside, name, owner)), thing


_PLUMBING = ("memcalc.autograd", "memcalc.ops", "memcalc.nn.module", "memcalc.nn.stack", "memcalc.nn.model")
"""Modules whose local variables say less than those of recipes."""


def _held(inside: str, name: str, owner: str) -> str:
    if inside == "memcalc.autograd.engine":
        return "gradient on its way to the next operation's backward"
    if inside.startswith(("memcalc.ops.", "memcalc.autograd.")):
        return f"used by the running operation ({owner.lstrip('_')})"
    return f"held by the local variable {name} of {owner}"


_CLOSED = (Module, Tape, Node, FunctionType, ModuleType, type, str, bytes, int, float)
"""What a local variable may refer to without holding tensors by it."""


def _reached(value: Any, depth: int) -> Iterator[Storage | Tensor]:
    """Tensors and storages that a value refers to through containers."""
    waiting, seen = [(value, depth)], set[int]()
    while waiting:
        item, left = waiting.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, Storage):
            yield item
        elif isinstance(item, Tensor):
            if not hasattr(item, "storage"):
                continue  # a weight that is not bound
            yield item
        elif left and not isinstance(item, _CLOSED):
            waiting += [(inner, left - 1) for inner in gc.get_referents(item)]
