"""Encoder and decoder together: targets, their shift, and what generation holds on to between tokens."""

from __future__ import annotations

from collections.abc import Callable

from memcalc import ops
from memcalc.autograd.tape import Tape
from memcalc.autograd.tensor import Tensor
from memcalc.errors import UsageError
from memcalc.nn.kv_cache import Cache
from memcalc.nn.model import Batch
from memcalc.nn.run_context import run_context
from memcalc.tables.dtypes import INT64


def shift_right(labels: Tensor) -> Tensor:
    """Decoder ids [b, t] from labels [b, t]: a start token, then all labels but the last."""
    tape = labels.tape
    batch, length = labels.shape
    shifted = tape.empty((batch, length), INT64)
    if length > 1:
        ops.clone(ops.narrow(labels, 1, length - 1), contiguous=True)
    ops.compare(shifted)
    return shifted


def wrap_right(labels: Tensor) -> Tensor:
    """Decoder ids [b, t] from labels [b, t]: the last label, then all the others (mBART's language token)."""
    tape = labels.tape
    batch, length = labels.shape
    shifted = ops.clone(labels)
    ops.compare(shifted)
    last = ops.add_scalar(ops.to(ops.compare(shifted), INT64))
    del last
    first = tape.empty((batch, 1), INT64)
    if length > 1:
        ops.clone(ops.narrow(shifted, 1, length - 1), contiguous=True)
    del first
    return shifted


def encoded(batch: Batch, cache: Cache | None, encoder: Callable[[Tensor, bool], Tensor]) -> Tensor:
    """What the encoder makes of the source; generation makes it once, repeats it for every beam, and keeps it."""
    if cache is not None and cache.states is not None:
        return cache.states
    if cache is not None and type(cache) is not Cache:
        raise UsageError(
            "an encoder-decoder is estimated with Transformers' own cache only; leave out --engine and --kv-dtype."
        )
    run = run_context(batch.ids)
    run.cache, kept = None, run.cache  # attention of an encoder caches nothing
    states = encoder(batch.ids, batch.padding)
    run.cache = kept
    if run.beams > 1:
        states = ops.repeat(states, run.beams)
    if cache is not None and batch.labels is None:
        cache.states = states
    return states


def decoder_input(
    batch: Batch, labels: Tensor | None, cache: Cache | None, shift: Callable[[Tensor], Tensor] = shift_right
) -> Tensor:
    """Ids of the decoder: the shifted labels in training; in generation a start token, then what comes."""
    if labels is not None:
        return shift(labels)
    if cache is not None and cache.past:
        return batch.ids
    return batch.ids.tape.empty((batch.ids.shape[0] * run_context(batch.ids).beams, 1), INT64)


def decoder_cache(tape: Tape, *, in_training: bool) -> Cache | None:
    """The cache that a decoder fills. One with a config of its own caches in training too, unless checkpointed."""
    run = run_context(tape)
    if run.cache is not None:
        return run.cache
    return Cache() if in_training and not run.checkpointing else None
