"""The engine that a layout asks for, put around a bound model."""

from __future__ import annotations

from collections.abc import Callable

from memcalc.autograd.tape import Tape
from memcalc.nn.model import Network
from memcalc.nn.module import Module
from memcalc.parallel.ddp import DistributedDataParallel
from memcalc.parallel.engine import Engine, Job
from memcalc.parallel.fsdp2 import FSDP2
from memcalc.parallel.setup import Parallel, ParallelSetup
from memcalc.parallel.zero3 import Zero3
from memcalc.parallel.zero12 import ZeroOneTwo
from memcalc.tables.dtypes import FP32
from memcalc.tables.precisions import PRECISIONS, PrecisionRecipe

ENGINES: dict[Parallel, Callable[[Job], Engine]] = {
    "ddp": DistributedDataParallel,
    "fsdp2": FSDP2,
    "zero1": ZeroOneTwo,
    "zero2": ZeroOneTwo,
    "zero3": Zero3,
}

_BUCKETS = ("zero1", "zero2", "zero3")
"""Engines whose buckets span blocks as it comes, so that no two blocks are alike."""
_TRACED_ONE_BY_ONE = 128
"""The deepest stack of which every block is traced for that; in deeper ones a bucket's flush may lie elsewhere."""

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
    if layout.engine in _BUCKETS:
        from memcalc.parallel.wrapping import stacks

        for stack in stacks(network):
            if stack.depth <= _TRACED_ONE_BY_ONE:
                stack.split(range(stack.depth))


def bind(  # noqa: PLR0913 (what an engine is put around)
    tape: Tape,
    trained: Module,
    network: Network,
    layout: ParallelSetup,
    precision_name: str,
    *,
    accumulates: bool,
    before: Engine | None = None,
) -> Engine:
    """Put the weights of `trained`, in which `network` runs, on the tape, and the engine around them.

    `before` is the engine of the step before, where that is known: some libraries learn from it.
    """
    recipe = precision(precision_name, layout)
    in_leaves = accumulates and layout.engine in ("none", "ddp", "zero1")
    tensors = trained.bind(tape, recipe.weights, accumulated=in_leaves)
    inside = PRECISIONS[precision_name].autocast or (recipe.weights if recipe.weights is not FP32 else None)
    job = Job(network, tensors, layout, recipe.compute, accumulates, inside)
    engine = ENGINES.get(layout.engine, Engine)(job)
    engine.learn(before)
    engine.attach(tape)
    tape.final_callbacks.append(engine.backward_over)
    return engine
