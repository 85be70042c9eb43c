"""The engine that a layout asks for, put around a bound model."""

from __future__ import annotations

from collections.abc import Callable

from memcalc.nn.model import Network
from memcalc.parallel.ddp import DistributedDataParallel
from memcalc.parallel.engine import Engine, Job
from memcalc.parallel.fsdp2 import FSDP2
from memcalc.parallel.setup import Parallel, ParallelSetup
from memcalc.tables.precisions import PRECISIONS, PrecisionRecipe

ENGINES: dict[Parallel, Callable[[Job], Engine]] = {"ddp": DistributedDataParallel, "fsdp2": FSDP2}

_CASTING = ("fsdp2", "fsdp1")
"""Engines with a mixed-precision policy of their own: they gather fp32 shards in 16 bits."""


def precision(name: str, layout: ParallelSetup) -> PrecisionRecipe:
    """A precision recipe as the layout carries it out: without autocast where the engine casts weights itself."""
    recipe = PRECISIONS[name]
    if layout.engine in _CASTING and not layout.autocast and recipe.autocast is not None:
        source = "MixedPrecisionPolicy over fp32 shards (torch.distributed.fsdp)"
        return PrecisionRecipe(recipe.name, recipe.weights, None, source, casts_to=recipe.autocast)
    return recipe


def prepare(network: Network, layout: ParallelSetup) -> None:
    """Let a model, unbound, trace as many kinds of blocks as the engine tells apart."""
    if layout.engine not in ("none", "ddp"):
        from memcalc.parallel.wrapping import stacks

        for stack in stacks(network):
            stack.split_by_neighbours()


def keeps_gradients(layout: ParallelSetup) -> bool:
    """Whether gradients of earlier micro-batches stand in the leaves of the graph."""
    return layout.engine in ("none", "ddp")


def engine(job: Job) -> Engine:
    """The engine of a job."""
    return ENGINES.get(job.layout.engine, Engine)(job)
