"""What a GPU can serve: how much of it an engine takes, and how many sequences or tokens that has room for."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from memcalc.errors import TooLongError, TooShortError
from memcalc.inference.generate import generate
from memcalc.inference.largest_fit import capacity
from memcalc.models.spec import ModelSpec
from memcalc.report.schema import EnginePool, Serving
from memcalc.setup.setup import InferenceSetup
from memcalc.tables.engines import ENGINES
from memcalc.tables.gpus import Gpu
from memcalc.training.traced_step import Step

if TYPE_CHECKING:
    from memcalc.inference.vllm_pool import Pool


def usable(spec: ModelSpec, setup: InferenceSetup, gpu: Gpu, step: Step, process: int) -> int:
    """Bytes of the GPU that the job, whose process takes `process`, may take.

    All of it, or the share that a serving engine is told to fill; with vLLM, its pool and what is no cache.
    """
    pool = _pool(spec, setup, gpu, step, step.seq_len)
    if pool is not None:
        return max(0, process + pool.nbytes - _cache(setup, step, step.seq_len))
    share = setup.gpu_memory_utilization or ENGINES[setup.engine].utilization
    return gpu.usable_bytes if share is None else int(gpu.usable_bytes * share)


def serving(
    spec: ModelSpec, setup: InferenceSetup, gpu: Gpu, step: Step, process_of: Callable[[Step, InferenceSetup], int]
) -> Serving:
    """The most sequences at once and the longest context that the GPU has room for, and the bytes that are taken.

    `step` is the job itself, `process_of` says what a job's process takes.
    """
    pool = _pool(spec, setup, gpu, step, step.seq_len)

    def fits(candidate: InferenceSetup) -> bool:
        if pool is not None:
            assert candidate.seq_len is not None
            found = _pool(spec, candidate, gpu, step, candidate.seq_len)
            return found is not None and _cache(candidate, step, candidate.seq_len) <= found.nbytes
        try:
            run = generate(spec, candidate, gpu)
            process = process_of(run, candidate)
            return process <= usable(spec, candidate, gpu, run, process)
        except TooLongError:
            return False
        except TooShortError:  # longer ones decide
            return True

    def runs(length: int) -> bool:
        try:
            generate(spec, setup.model_copy(update={"batch": 1, "seq_len": length}), gpu)
        except TooShortError:
            return False
        return True

    found = capacity(setup, step.seq_len, fits, spec.positions)
    counts_tokens = step.network.reads_text and step.network.source_is_text
    context = found.context if counts_tokens and found.context and runs(found.context) else 0
    process = process_of(step, setup)
    fills = ENGINES[setup.engine].utilization is not None
    reserved = usable(spec, setup, gpu, step, process) if fills else process
    return Serving(
        largest_batch=found.batch,
        longest_context=context,
        engine_reserved_bytes=reserved if pool is None else _reserved(pool, setup, gpu),
        pool=None if pool is None else _said(pool, setup, gpu, step),
    )


def _pool(spec: ModelSpec, setup: InferenceSetup, gpu: Gpu, step: Step, length: int) -> Pool | None:
    """vLLM's pool for sequences of `length` tokens and what they generate; None where there is none."""
    if setup.engine != "vllm" or step.cache_for is None:
        return None
    from memcalc.inference.vllm_pool import kv_pool

    return kv_pool(spec, setup, gpu, step, length + setup.max_new_tokens)


def _cache(setup: InferenceSetup, step: Step, length: int) -> int:
    """Bytes of the pool that the sequences of `setup` need when the last token is decoded."""
    assert step.cache_for is not None
    return step.cache_for(setup.batch * setup.num_beams, length + setup.max_new_tokens - 1)


def _reserved(pool: Pool, setup: InferenceSetup, gpu: Gpu) -> int:
    """Bytes of the whole process: the budget, the CUDA context that came before it, and graphs that come after."""
    from memcalc.breakdown.process_memory import ProcessMemory

    context = ProcessMemory.for_job(0, setup, gpu, 0).context
    graphs = 0 if pool.graphs_in_budget else pool.graphs
    return min(gpu.usable_bytes, pool.budget + context + graphs)


def _said(pool: Pool, setup: InferenceSetup, gpu: Gpu, step: Step) -> EnginePool:
    assert step.cache_for is not None
    share = -(-(pool.taken + _cache(setup, step, step.seq_len)) * 100 // gpu.usable_bytes) / 100
    length = step.seq_len + setup.max_new_tokens
    return EnginePool(
        budget_bytes=pool.budget,
        weights_bytes=pool.weights,
        activations_bytes=pool.activations,
        non_torch_bytes=pool.non_torch,
        cuda_graphs_bytes=pool.graphs,
        graphs_in_budget=pool.graphs_in_budget,
        pool_bytes=pool.nbytes,
        pool_tokens=max(0, pool.nbytes) * length // max(1, step.cache_for(1, length)),
        profiled_tokens=pool.profiled_tokens,
        profiled_sequences=pool.profiled_sequences,
        smallest_utilization=share if share <= 1 else None,
    )
