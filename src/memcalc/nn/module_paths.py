"""Where a module hangs in a network, so that another can take its place."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from memcalc.nn.layers.linear import Conv1D, Embedding, Linear
from memcalc.nn.module import Module
from memcalc.nn.towers import VISION


@dataclass(frozen=True)
class Site:
    """A module with its dotted name, and the attribute (and index) of the parent that holds it."""

    name: str
    parent: Module
    attribute: str
    index: int | None
    module: Module

    @property
    def leaf(self) -> str:
        """The last part of the name."""
        return self.name.rpartition(".")[2]

    def replace(self, module: Module) -> None:
        """Put `module` in this place."""
        if self.index is None:
            setattr(self.parent, self.attribute, module)
        else:
            getattr(self.parent, self.attribute)[self.index] = module


def sites(root: Module) -> list[Site]:
    """Every module below `root` once, parents first, in the order of torch's `named_modules()`."""
    return list(_walk(root, "", set()))


def _walk(parent: Module, prefix: str, seen: set[int]) -> Iterator[Site]:
    for name, module in parent.children():
        if id(module) in seen:
            continue
        seen.add(id(module))
        attribute, index = _attribute_of(parent, module)
        full = f"{prefix}.{name}" if prefix and name else prefix or name
        yield Site(full, parent, attribute, index, module)
        yield from _walk(module, full, seen)


def _attribute_of(parent: Module, module: Module) -> tuple[str, int | None]:
    for attribute, value in vars(parent).items():
        if value is module:
            return attribute, None
        if isinstance(value, list):
            for index, item in enumerate(value):
                if item is module:
                    return attribute, index
    raise LookupError(f"{module!r} does not hang on {parent!r}")


def matches(name: str, targets: frozenset[str]) -> bool:
    """PEFT's rule for lists of targets: the whole name, or its end after a dot."""
    return name in targets or any(name.endswith(f".{target}") for target in targets)


def split_names(text: str) -> frozenset[str]:
    """Names separated by commas."""
    return frozenset(name.strip() for name in text.split(",") if name.strip())


def linear_names(found: list[Site]) -> str:
    """The distinct last names of the linear modules of a network, for messages; of `mlp.0`, both parts."""
    named = (site for site in found if isinstance(site.module, (Linear, Conv1D)))
    names = dict.fromkeys(".".join(site.name.split(".")[-2:]) if site.leaf.isdecimal() else site.leaf for site in named)
    return ", ".join(names) or "none"


def output_head(found: list[Site]) -> Module | None:
    """The projection to the vocabulary (Transformers' `get_output_embeddings`), where the network has one.

    It is the last linear layer of the LM head, which may share its weight with an embedding.
    """
    tables = {id(site.module.weight) for site in found if isinstance(site.module, Embedding)}
    heads = [
        site.module
        for site in found
        if isinstance(site.module, Linear)
        and (site.module.weight.group == "LM head" or id(site.module.weight) in tables)
    ]
    return heads[-1] if heads else None


def token_embeddings(found: list[Site]) -> list[Embedding]:
    """The token embedding: the first one that is not a vision tower's, and those that share its table.

    Beside what makes vectors of pixels there are only tables of positions.
    """
    towers = tuple(f"{site.name.rpartition('.')[0]}." for site in found if site.module.is_input_embedding)
    embeddings = [
        site.module
        for site in found
        if isinstance(site.module, Embedding)
        and site.module.weight.group != VISION
        and not site.name.startswith(towers)
    ]
    return [embedding for embedding in embeddings if embedding.weight is embeddings[0].weight]


def input_embeddings(found: list[Site]) -> list[Module]:
    """What Transformers' `get_input_embeddings` gives, of the model and of the towers in it."""
    return [*token_embeddings(found), *(site.module for site in found if site.module.is_input_embedding)]
