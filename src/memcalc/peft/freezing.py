"""Which weights are trained: everything, the head, biases, the last blocks, or what is named."""

from __future__ import annotations

import re
from collections.abc import Callable

from memcalc.errors import UsageError
from memcalc.nn.module import Module, Parameter
from memcalc.nn.stack import Stack

_LAST = re.compile(r"last-([0-9]{1,4})")
_WORDS = ("all", "head", "bias")
_HEADS = ("head", "LM head")
_GROUPS = {"vision": "vision", "embedding": "embedding"}

Chosen = Callable[[str, Parameter], bool]
"""Whether the parameter of this name is chosen."""


def tell_trained_apart(network: Module, what: str) -> None:
    """Split stacks whose blocks are not all trained alike, or that have blocks before the first that is.

    Those need no gradient. Call it before anything is done to the blocks, as they are built again.
    """
    if what == "all":
        return
    if (last := _LAST.fullmatch(what)) is not None:
        stack, first = _last_blocks(network, int(last[1]))
        stack.split([min(max(position - first, -1), 1) for position in range(stack.depth)])
        return
    chosen = _meant(what)
    for prefix, module in network.modules():
        if not isinstance(module, Stack):
            continue
        trained = [
            frozenset(
                name for name, parameter in block.parameters() if chosen(f"{prefix}.{position}.{name}", parameter)
            )
            for position, block in module.positions
        ]
        if len(set(trained)) > 1:  # a first block that is trained as all others are is traced by itself anyway
            first = next(position for position, names in enumerate(trained) if names)
            module.split([(names, position > first) for position, names in enumerate(trained)])


def train_only(network: Module, what: str) -> None:
    """Freeze every weight that `what` does not name: all, head, bias, last-N, or module names with commas."""
    if what == "all":
        return
    last = _LAST.fullmatch(what)
    if last is not None:
        _train_last(network, int(last[1]))
        return
    for name in _names(what):
        if name not in _WORDS and not any(_within(name)(full, p) for full, p in network.parameters()):
            raise UsageError(
                f"--train-only {name} means no weight of this model; use all, head, bias or last-N, or name "
                "modules that it "
                f"has ({_leaves(network)})."
            )
    _mark(network, _meant(what))
    if not any(parameter.trainable for _, parameter in network.parameters()):
        raise UsageError(
            f"--train-only {what} leaves nothing to train: no weight of this model is meant by it; name "
            "modules instead "
            f"(it has {_leaves(network)})."
        )


def freeze(network: Module, what: str) -> None:
    """Freeze what `what` names: vision, embedding, or module names, with commas."""
    for name in _names(what):
        chosen = [p for full, p in network.parameters() if _within(name)(full, p)]
        if not chosen:
            raise UsageError(
                f"--freeze {name} means no weight of this model; name modules that it has ({_leaves(network)})."
            )
        for parameter in chosen:
            parameter.trainable = False
    if not any(parameter.trainable for _, parameter in network.parameters()):
        raise UsageError(f"--freeze {what} leaves nothing to train; name fewer modules.")


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _within(name: str) -> Chosen:
    """A group by its word, else whatever lies in a module of that name (or name of several parts)."""
    group = _GROUPS.get(name)
    inner = f".{name}."
    return lambda full, parameter: parameter.group == group if group is not None else inner in f".{full}."


def _mark(network: Module, chosen: Chosen) -> None:
    for name, parameter in network.tensors():
        parameter.trainable = chosen(name, parameter)


def _meant(what: str) -> Chosen:
    """What head, bias, or names of modules with commas mean. Raises UsageError where a word has names beside it."""
    if what == "head":
        return lambda name, parameter: parameter.group in _HEADS
    if what == "bias":
        return lambda name, parameter: name.rpartition(".")[2] == "bias"
    names = _names(what)
    alone = [name for name in names if name in _WORDS or _LAST.fullmatch(name)]
    if alone and len(names) > 1:
        raise UsageError(f"--train {alone[0]} stands alone, without names of modules beside it; leave one of them out.")
    tests = [_within(name) for name in names]
    return lambda name, parameter: any(test(name, parameter) for test in tests)


def _last_blocks(network: Module, count: int) -> tuple[Stack, int]:
    """The last stack, and the position of the first of its last `count` blocks."""
    stacks = [module for _, module in network.modules() if isinstance(module, Stack)]
    if not stacks or not 0 < count <= stacks[-1].depth:
        depth = stacks[-1].depth if stacks else 0
        raise UsageError(
            f"--train-only last-{count} asks for {count} blocks, but the model has {depth}; lower the number."
        )
    return stacks[-1], stacks[-1].depth - count


def _train_last(network: Module, count: int) -> None:
    """Train the last `count` blocks of the last stack, and what comes behind it without being shared with the rest."""
    stack, first = _last_blocks(network, count)
    inside = {id(module) for _, block in stack.positions for _, module in block.modules()}
    begun = False
    _mark(network, lambda name, parameter: False)
    before: set[int] = set()
    for _, module in network.modules():
        begun = begun or module is stack
        for _, parameter in module.direct_tensors():
            if not begun:
                before.add(id(parameter))
            elif id(module) not in inside and id(parameter) not in before:
                parameter.trainable = True
    for position, block in stack.positions:
        for _, parameter in block.parameters():
            parameter.trainable = position >= first


def _leaves(network: Module) -> str:
    """The distinct last names of the modules, for messages."""
    names = (name.rpartition(".")[2] for name, _ in network.modules())
    return ", ".join(dict.fromkeys(name for name in names if name and not name.isdigit()))
