"""What libraries for several GPUs ask for beside the events of a step: shards, and buckets that gradients go through.

Sources: torch/nn/parallel/distributed.py, torch/csrc/distributed/c10d/comm.cpp and reducer.cpp of PyTorch 2.14.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from memcalc.allocator.events import Events, JobEvents
from memcalc.allocator.loading import every_tensor, moved, whole_bytes
from memcalc.allocator.zero import flattened, sharded
from memcalc.common.sizes import MIB
from memcalc.nn.module import Buffer, Module
from memcalc.parallel.ddp import DistributedDataParallel
from memcalc.parallel.engine import Engine
from memcalc.parallel.zero3 import Zero3
from memcalc.parallel.zero12 import ZeroOneTwo
from memcalc.training.traced_step import Step

BROADCAST = 250 * MIB
"""Bytes of a piece in which rank 0 sends its weights to the others (`broadcast_bucket_size`)."""
IN_FLIGHT = 2
"""Pieces that are sent at the same time (`broadcast_coalesced`)."""


def with_engine(job: JobEvents, step: Step, engine: Engine) -> JobEvents:
    """The job of a step as an engine runs it."""
    if isinstance(engine, DistributedDataParallel):
        return _with_buckets(job, step.network, engine)
    if isinstance(engine, ZeroOneTwo):
        return replace(job, loading=flattened(step.network, engine))
    if isinstance(engine, Zero3):
        return replace(job, loading=sharded(step.network, engine))
    return replace(job, loading=moved(step.network, engine.kept_bytes))


def _with_buckets(job: JobEvents, network: Module, engine: DistributedDataParallel) -> JobEvents:
    """Weights are sent around once, in copies. The buckets of the first step give way to those of all others."""
    loading = Events()
    loading.append(job.loading)
    _broadcast(loading, network)
    first = Events()
    first.begin("forward")
    before = [first.malloc(nbytes) for nbytes in engine.first_buckets()]
    first.append(job.first)
    if engine.rebuilds:
        for number in before:
            first.free(number)
        for nbytes in engine.buckets():
            first.malloc(nbytes)
    return replace(job, loading=loading, first=first)


def _broadcast(events: Events, network: Module) -> None:
    """Send all weights and buffers to the other ranks, in flat copies."""
    flying: list[int] = []
    for nbytes in _pieces(network):
        if len(flying) == IN_FLIGHT:
            events.free(flying.pop(0))
        flying.append(events.malloc(nbytes))
    for number in flying:
        events.free(number)


def _pieces(network: Module) -> Iterable[int]:
    """Bytes of the flat copies: tensors of one dtype, until a piece is full."""
    tensors = [tensor for tensor, again in every_tensor(network) if not again and tensor.numel]
    waiting: dict[str, int] = {}
    for tensor in sorted(tensors, key=lambda tensor: isinstance(tensor, Buffer)):
        name = tensor.dtype.name
        waiting[name] = waiting.get(name, 0) + whole_bytes(tensor)
        if waiting[name] >= BROADCAST:
            yield waiting.pop(name)
    yield from waiting.values()
