"""Which weights are trained: everything, the head, biases, the last blocks, or what is named."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from memcalc.errors import UsageError
from memcalc.nn.module import Module, Parameter
from memcalc.nn.stack import Stack

_LAST = re.compile(r"last-([0-9]{1,4})")
_HEADS = ("head", "LM head")
_GROUPS = {"vision": "vision", "embedding": "embedding"}

Chosen = Callable[[str, Parameter], bool]
"""Whether the parameter of this name is chosen."""


def train_only(network: Module, what: str) -> None:
    """Freeze every weight that `what` does not name: all, head, bias, last-N, or module names with commas."""
    if what == "all":
        return
    last = _LAST.fullmatch(what)
    if last is not None:
        _train_last(network, int(last[1]))
        return
    if what == "head":
        _mark(network, lambda name, parameter: parameter.group in _HEADS)
    elif what == "bias":
        _mark(network, lambda name, parameter: name.rpartition(".")[2] == "bias")
    else:
        _train_named(network, what)
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


def _train_named(network: Module, what: str) -> None:
    """Train what the names mean. Names may hold positions of blocks, which are then told apart."""
    names = _names(what)
    alone = [name for name in names if name in ("all", "head", "bias") or _LAST.fullmatch(name)]
    if alone and len(names) > 1:
        raise UsageError(f"--train {alone[0]} stands alone, without names of modules beside it; leave one of them out.")
    tests = [_within(name) for name in names]
    if any(re.search(r"(^|\.)[0-9]+(\.|$)", name) for name in names) or _begins_within(network, tests):
        _split_by_name(network, names)
    for name, test in zip(names, tests, strict=True):
        if not any(test(full, parameter) for full, parameter in network.parameters()):
            raise UsageError(
                f"--train-only {name} means no weight of this model; use all, head, bias or last-N, or name "
                "modules that it "
                f"has ({_leaves(network)})."
            )
    _mark(network, lambda full, parameter: any(test(full, parameter) for test in tests))


def _begins_within(network: Module, tests: list[Chosen]) -> bool:
    """Whether the first block of a stack that is trained has others before it, which need no gradient."""
    for prefix, module in network.modules():
        if isinstance(module, Stack):
            chosen = [
                any(
                    test(f"{prefix}.{position}.{name}", parameter)
                    for name, parameter in block.parameters()
                    for test in tests
                )
                for position, block in module.positions
            ]
            if any(chosen) and not chosen[0]:
                return True
    return False


def _split_by_name(network: Module, names: Iterable[str]) -> None:
    """Tell blocks apart by which of their weights are named, and by whether a weight before them is."""
    tests = [_within(name) for name in names]
    for prefix, module in network.modules():
        if not isinstance(module, Stack):
            continue
        marks: list[tuple[frozenset[str], bool]] = []
        reached = False
        for position, block in module.positions:
            chosen = frozenset(
                inner
                for inner, parameter in block.parameters()
                if any(test(f"{prefix}.{position}.{inner}", parameter) for test in tests)
            )
            marks.append((chosen, reached))
            reached = reached or bool(chosen)
        module.split(marks)


def _train_last(network: Module, count: int) -> None:
    """Train the last `count` blocks of the last stack, and what comes behind it without being shared with the rest."""
    stacks = [module for _, module in network.modules() if isinstance(module, Stack)]
    if not stacks or not 0 < count <= stacks[-1].depth:
        depth = stacks[-1].depth if stacks else 0
        raise UsageError(
            f"--train-only last-{count} asks for {count} blocks, but the model has {depth}; lower the number."
        )
    stack = stacks[-1]
    first = stack.depth - count
    stack.split([min(max(position - first, -1), 1) for position in range(stack.depth)])
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
