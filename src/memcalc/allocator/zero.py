"""What DeepSpeed's ZeRO asks for when it takes a model over, and when its optimizer steps.

Source: deepspeed/runtime/zero/{stage_1_and_2,stage3,partition_parameters}.py of DeepSpeed 0.19.6.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from memcalc.allocator.events import Events
from memcalc.allocator.loading import every_tensor, whole_bytes
from memcalc.allocator.optimizer_events import step_over
from memcalc.nn.module import Buffer, Module
from memcalc.parallel.zero3 import Zero3
from memcalc.parallel.zero12 import MASTER, ZeroOneTwo
from memcalc.tables.dtypes import FP32
from memcalc.training.traced_step import Step

NORM = 8
"""Bytes of an element of a gradient whose norm is taken, and of the norm."""


def flattened(network: Module, engine: ZeroOneTwo) -> Events:
    """Stages 1 and 2: trained weights become one flat tensor, of which this rank copies its part in fp32."""
    events = Events()
    trained = set(engine.indices)
    apart: list[int] = []
    for tensor, again in every_tensor(network):
        if not again and tensor.numel:
            number = events.malloc(whole_bytes(tensor))
            if id(tensor) in trained:
                apart.append(number)
    if not apart:
        return events
    partition = engine.partition
    events.malloc(partition.padded * engine.dtype.itemsize)
    for number in apart:
        events.free(number)
    copy = events.malloc(partition.size * engine.dtype.itemsize)
    if engine.dtype is not FP32:
        events.malloc(partition.size * MASTER)
        events.free(copy)
    _for_a_moment(events, partition.size * MASTER)  # the gradient that it has before the first step
    return events


def sharded(network: Module, engine: Zero3) -> Events:
    """Stage 3: each weight comes whole and leaves a shard; the shards become one tensor, by way of the host."""
    events = Events()
    for tensor, again in every_tensor(network):
        if isinstance(tensor, Buffer) and not again and tensor.numel:
            events.malloc(whole_bytes(tensor))
    itemsize = engine.dtype.itemsize
    for nbytes in engine.frozen_shards():
        events.malloc(nbytes)
    if not engine.chunks:
        return events
    events.malloc(sum(engine.chunks) * itemsize)
    groups = engine.sub_groups()
    if engine.dtype is not FP32:
        for elements in groups:
            cast = events.malloc(elements * MASTER)
            events.malloc(elements * MASTER)
            events.free(cast)
    _for_a_moment(events, max(groups) * MASTER)
    events.malloc(engine.options.reduce_bucket_size * itemsize)
    events.malloc(sum(engine.chunks) * itemsize)  # the gradients of its shards
    for nbytes in () if engine.drops_small else engine.persistent():
        events.malloc(nbytes)
    events.malloc(1)  # whether a gradient is infinite
    return events


def zero_update(events: Events, gradients: Sequence[int], step: Step, *, first: bool) -> None:
    """The step of DeepSpeed's optimizer, which steps over flat fp32 tensors.

    `gradients` are those of this rank's part in stages 1 and 2, before what the loop made.
    """
    engine = step.engine
    events.begin("step")
    if isinstance(engine, Zero3):
        _norms(events, engine.chunks, first=first)
        for number in gradients:
            events.free(number)
        many = len(engine.chunks) > 1
        for weight, elements in zip(step.trained, engine.sub_groups(), strict=True):
            single = _single(events, elements, engine.dtype.itemsize, copied=many)
            step_over(events, step, [weight], first=first)
            events.free(single)
        return
    assert isinstance(engine, ZeroOneTwo)
    pieces = engine.partition.pieces
    _norms(events, pieces, first=first)
    single = _single(events, engine.partition.size, engine.dtype.itemsize, copied=len(pieces) > 1)
    for number in gradients:
        events.free(number)
    step_over(events, step, step.trained, first=first)
    events.free(single)


def _norms(events: Events, pieces: Iterable[int], *, first: bool) -> None:
    """The norm of each piece of the gradients, in fp64, and of all: the last one stays."""
    norms = []
    for piece in pieces:
        wide = events.malloc(NORM * piece)
        norms.append(events.malloc(NORM))
        events.free(wide)
    for number in norms:
        events.free(number)
    if first:
        events.malloc(NORM)


def _single(events: Events, elements: int, itemsize: int, *, copied: bool) -> int:
    """The flat fp32 gradient: `copied` together from several pieces, then cast."""
    flat = events.malloc(elements * itemsize) if copied else None
    if itemsize == MASTER and flat is not None:
        return flat
    single = events.malloc(elements * MASTER)
    if flat is not None:
        events.free(flat)
    return single


def _for_a_moment(events: Events, nbytes: int) -> None:
    events.free(events.malloc(nbytes))
