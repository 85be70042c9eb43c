"""Which modules a sharding library wraps together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from memcalc.errors import UsageError
from memcalc.nn.layers.mixture_of_experts import Experts
from memcalc.nn.model import Network
from memcalc.nn.module import Module, Parameter
from memcalc.nn.module_paths import output_head, sites, token_embeddings
from memcalc.nn.stack import Stack
from memcalc.parallel.engine import own_parameters
from memcalc.parallel.setup import Wrap


@dataclass(frozen=True, eq=False)
class Unit:
    """Modules that are gathered together, and the parameters below them that no inner unit took."""

    modules: tuple[Module, ...]
    parameters: tuple[Parameter, ...]
    reshard: bool
    """Whether its weights are freed after forward where nobody asked otherwise."""
    copies: int = 1
    root: bool = False
    expert: bool = False
    """Whether these are experts, which are sharded over the ranks that hold the same ones."""


def units(network: Network, wrap: Wrap, *, experts: bool = False, peft: bool = False) -> list[Unit]:
    """The units of a model, the root last.

    blocks: each block of a stack, and the root with the rest; root: the model as a whole; parts: embedding and head
    apart too; plan: the embedding, each block, and all that is left (final norm and head) together, which stays
    gathered (Transformers' `fsdp_plan`, Accelerate). With `experts`, those of each layer are a unit of their own.
    With `peft`, adapters are (blocks), or the final norm is left to the root (plan).
    """
    taken: set[int] = set()
    found = list(_experts(network, taken)) if experts else []
    found += _leaves(network, taken) if peft and wrap == "blocks" else []
    found += _inner(network, wrap, taken)
    if wrap == "plan" and peft and (head := output_head(sites(network))) is not None:
        weights = tuple(own_parameters([head], taken))
        found.append(
            Unit(_holders(network, weights), weights, reshard=False)
        )  # the embedding, too, where they are tied
    rest = tuple(own_parameters([network], taken))
    if wrap == "plan" and rest and not peft:
        found.append(Unit(_holders(network, rest), rest, reshard=False))
        rest = ()
    return [*found, Unit((network,), rest, reshard=False, root=True)]


def _experts(network: Network, taken: set[int]) -> Iterator[Unit]:
    for _, module in network.modules():
        if isinstance(module, Experts):
            yield Unit((module,), tuple(own_parameters([module], taken)), True, module.copies, expert=True)


def _leaves(network: Network, taken: set[int]) -> Iterator[Unit]:
    for _, module in network.modules():
        weight = vars(module).get("weight")
        if isinstance(weight, Parameter) and weight.requires_grad and not any(module.children()):
            yield Unit((module,), tuple(own_parameters([module], taken)), True, weight.copies)


def _inner(network: Network, wrap: Wrap, taken: set[int]) -> Iterator[Unit]:
    if wrap in ("parts", "plan"):
        yield from _ends(network, wrap, taken)
    if wrap != "root":
        for stack in stacks(network):
            for _, block in stack.children():
                parameters = tuple(own_parameters([block], taken))
                yield Unit((block,), parameters, reshard=True, copies=block.copies)


def _ends(network: Network, wrap: Wrap, taken: set[int]) -> Iterator[Unit]:
    found = sites(network)
    head = output_head(found)
    tables = token_embeddings(found)
    tied = head is not None and any(table.weight is vars(head).get("weight") for table in tables)
    if tied and wrap == "parts":
        raise UsageError(
            "--fsdp-wrap parts makes groups of the embedding and of the head, which share their weight here; take "
            "blocks or plan."
        )
    if not tied and tables:
        yield Unit((tables[0],), tuple(own_parameters([tables[0]], taken)), reshard=True)
    if wrap == "parts" and head is not None:
        yield Unit((head,), tuple(own_parameters([head], taken)), reshard=True)


def stacks(module: Module) -> Iterator[Stack]:
    """The outermost stacks of blocks below a module, in order."""
    for _, child in module.children():
        if isinstance(child, Stack):
            yield child
        else:
            yield from stacks(child)


def _holders(network: Network, parameters: tuple[Parameter, ...]) -> tuple[Module, ...]:
    """The modules that hold these parameters themselves."""
    wanted = {id(parameter) for parameter in parameters}
    return tuple(
        module
        for _, module in network.modules()
        if any(id(parameter) in wanted for _, parameter in module.direct_tensors())
    )
