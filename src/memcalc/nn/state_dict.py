"""Weights under the names that a checkpoint gives them: one by one, not one for all blocks of a kind."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from memcalc.nn.module import Buffer, Module, Parameter
from memcalc.nn.stack import Stack


class NamedWeight(NamedTuple):
    """A weight of the model: its dotted name, the module that it hangs on, and the parameter that describes it."""

    name: str
    owner: Module
    parameter: Parameter


def every_weight(network: Module) -> Iterator[NamedWeight]:
    """All weights, those of every block of a stack at its own position; a tied one comes once, buffers never."""
    return _walk(network, "", set())


def _walk(module: Module, prefix: str, seen: set[int]) -> Iterator[NamedWeight]:
    for name, value in module.direct_tensors():
        if id(value) not in seen and not isinstance(value, Buffer):
            seen.add(id(value))
            yield NamedWeight(_joined(prefix, name), module, value)
    for name, child in module.children():
        path = _joined(prefix, name)
        if not isinstance(child, Stack) or child.shared:
            yield from _walk(child, path, seen)
            continue
        for block in child:
            weights = list(_walk(block.module, "", seen))
            for position in block.traced.positions:
                yield from (NamedWeight(f"{path}.{position}.{w.name}", w.owner, w.parameter) for w in weights)


def weights_by_stack(network: Module) -> Iterator[tuple[str, Sequence[int], list[NamedWeight]]]:
    """The same in groups: the dotted name of a stack, positions of blocks that are alike, and one block's weights.

    Names are those within the block. Weights outside of stacks come in groups of their own, without positions.
    """
    yield from _grouped(network, "", set())


def _grouped(module: Module, prefix: str, seen: set[int]) -> Iterator[tuple[str, Sequence[int], list[NamedWeight]]]:
    own = []
    for name, value in module.direct_tensors():
        if id(value) not in seen and not isinstance(value, Buffer):
            seen.add(id(value))
            own.append(NamedWeight(_joined(prefix, name), module, value))
    yield "", (), own
    for name, child in module.children():
        path = _joined(prefix, name)
        if not isinstance(child, Stack) or child.shared:
            yield from _grouped(child, path, seen)
            continue
        for block in child:
            yield path, block.traced.positions, list(_walk(block.module, "", seen))


def _joined(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix and name else prefix or name
