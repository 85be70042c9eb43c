"""What a GPU can serve: how much of it an engine takes, and how many sequences or tokens that has room for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from memcalc.common.largest_fit import ENDLESS, LIMIT, largest_fit
from memcalc.errors import TooLongError, TooShortError
from memcalc.inference.generate import generate
from memcalc.inference.served_model import served_model
from memcalc.models.spec import ModelSpec
from memcalc.setup.setup import InferenceSetup
from memcalc.tables import sglang
from memcalc.tables.engines import ENGINES
from memcalc.tables.gpus import Gpu
from memcalc.training.traced_step import Step


def usable(setup: InferenceSetup, gpu: Gpu) -> int:
    """Bytes of the GPU that the job may take: all, or the share that a serving engine is told to fill."""
    share = setup.gpu_memory_utilization or ENGINES[setup.engine].utilization
    if setup.engine == "sglang" and setup.gpu_memory_utilization is None:
        share = sglang.defaults(gpu, setup.tensor_parallel_size).mem_fraction_static
    return gpu.usable_bytes if share is None else int(gpu.usable_bytes * share)


@dataclass(frozen=True)
class Capacity:
    """Largest batch at the setup's length, and longest context at batch one; 0 where not even one fits."""

    batch: int
    context: int


PoolOf = Callable[[int], int]
"""Bytes of an engine's pool of pages for sequences of so many tokens, before any is served."""


def serving(
    spec: ModelSpec,
    setup: InferenceSetup,
    gpu: Gpu,
    step: Step,
    process_of: Callable[[Step, InferenceSetup], int],
    pool_of: PoolOf | None = None,
) -> Capacity:
    """The most sequences at once and the longest context that the GPU has room for.

    `step` is the job itself, `process_of` says what a job's process takes; with `pool_of`, the sequences have to fit
    the pool. The context ends at the positions of the model, if they end.
    """
    if step.components:  # a diffusion pipeline has no context
        return _pictures(spec, setup, gpu, step, process_of)
    model = served_model(spec, setup, gpu, step.stage)
    room = usable(setup, gpu)

    def run(batch: int, length: int) -> int:
        candidate = setup.model_copy(update={"batch": batch, "seq_len": length})
        try:
            return process_of(generate(spec, candidate, model), candidate)
        except TooLongError:
            return ENDLESS
        except TooShortError:  # longer ones decide
            return 0

    def size(batch: int, length: int) -> int:
        if pool_of is None:
            return run(batch, length)
        return max(1, room + cache_bytes(setup, step, batch, length) - pool_of(length))

    here = size(setup.batch, step.seq_len) if pool_of is not None else process_of(step, setup)
    batch = largest_fit(lambda n: size(n, step.seq_len), room, setup.max_num_seqs or LIMIT, {setup.batch: here})
    context = 0
    if step.network.reads_text and step.network.source_is_text:
        known = {step.seq_len: here} if setup.batch == 1 else {}
        context = largest_fit(lambda n: size(1, n), room, min(spec.positions or LIMIT, LIMIT), known)
        if context and not run(1, context):  # nothing that fits is long enough
            context = 0
    return Capacity(batch, context)


def cache_bytes(setup: InferenceSetup, step: Step, batch: int, length: int) -> int:
    """Bytes of the pool that `batch` sequences need when the last token is decoded."""
    assert step.cache_for is not None
    return step.cache_for(batch * setup.num_beams, length + setup.max_new_tokens - 1)


def _pictures(
    spec: ModelSpec, setup: InferenceSetup, gpu: Gpu, step: Step, process_of: Callable[[Step, InferenceSetup], int]
) -> Capacity:
    """The most prompts of a diffusion pipeline's call."""

    def size(batch: int) -> int:
        candidate = setup.model_copy(update={"batch": batch})
        return process_of(generate(spec, candidate), candidate)

    return Capacity(largest_fit(size, usable(setup, gpu), known={setup.batch: process_of(step, setup)}), 0)
