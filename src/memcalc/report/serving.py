"""Whether an inference job fits, and what the GPU serves: of vLLM, what its pool of pages holds."""

from __future__ import annotations

from collections.abc import Callable

from memcalc.allocator.job import conf_of, generation_events
from memcalc.allocator.simulated_jobs import not_simulated
from memcalc.allocator.smallest_device import runs
from memcalc.breakdown.model_weights import model_weights
from memcalc.breakdown.process_memory import ProcessMemory
from memcalc.inference.serving import Capacity, cache_bytes, serving, usable
from memcalc.inference.vllm_pool import Pool, Served, kv_pool
from memcalc.models.spec import ModelSpec
from memcalc.peak.ranks import cards_of, phase_totals, with_loading
from memcalc.peak.sweep import Sweep
from memcalc.report.gpu_schema import EnginePool, Serving
from memcalc.setup.setup import InferenceSetup
from memcalc.tables.engines import ENGINES
from memcalc.tables.gpus import Gpu
from memcalc.training.traced_step import Step


def free_bytes(spec: ModelSpec, setup: InferenceSetup, gpu: Gpu, step: Step, process: int) -> int:
    """What a job whose process takes `process` leaves of what it may take; of vLLM's pool, what its sequences leave."""
    pool_of = _pools(spec, setup, gpu, step)
    if pool_of is None:
        return usable(setup, gpu) - process
    return pool_of(step.seq_len).nbytes - cache_bytes(setup, step, setup.batch, step.seq_len)


def serving_of(spec: ModelSpec, setup: InferenceSetup, gpu: Gpu, step: Step, process: int) -> Serving:
    """What the GPU serves of the job of `step`, whose process takes `process` bytes."""

    def process_of(run: Step, candidate: InferenceSetup) -> int:
        return max(
            ProcessMemory.for_job(
                card.input_bytes, candidate, gpu, max(phase_totals(with_loading(card)).values())
            ).process
            for card in cards_of(run).values()
        )

    pool_of = _pools(spec, setup, gpu, step)
    if pool_of is None:
        found = serving(spec, setup, gpu, step, process_of)
        if not_simulated(step, setup, gpu) is None and setup.allocator_reserve is None:
            found = _that_run(found, spec, setup, gpu, step.seq_len)
        fills = ENGINES[setup.engine].utilization is not None
        reserved = usable(setup, gpu) if fills else process
        return _said(found.batch, found.context, reserved)
    found = serving(spec, setup, gpu, step, process_of, lambda length: pool_of(length).nbytes)
    pool = pool_of(step.seq_len)
    context = ProcessMemory.for_job(0, setup, gpu, 0).context  # there before vLLM measures what is free
    reserved = min(gpu.usable_bytes, pool.budget + context + (0 if pool.graphs_in_budget else pool.graphs))
    return _said(found.batch, found.context, reserved, _pool(pool, setup, gpu, step))


def _that_run(found: Capacity, spec: ModelSpec, setup: InferenceSetup, gpu: Gpu, length: int) -> Capacity:
    """The same, or less where the allocator finds no room for so much."""
    limit = usable(setup, gpu) - ProcessMemory.for_job(0, setup, gpu, 0).context
    conf = conf_of(setup)

    def at_most(most: int, change: Callable[[int], dict[str, int]]) -> int:
        def works(n: int) -> bool:
            return runs(generation_events(spec, setup.model_copy(update=change(n)), gpu), limit, conf)

        if not most or works(most):
            return most
        fits, fails = 0, most
        while fails - fits > 1:
            middle = (fits + fails) // 2
            fits, fails = (middle, fails) if works(middle) else (fits, middle)
        return fits

    batch = at_most(found.batch, lambda n: {"batch": n, "seq_len": length})
    return Capacity(batch, at_most(found.context, lambda n: {"batch": 1, "seq_len": n}))


def _pools(spec: ModelSpec, setup: InferenceSetup, gpu: Gpu, step: Step) -> Callable[[int], Pool] | None:
    """vLLM's pool for sequences of so many tokens and what they generate; None where there is none."""
    if setup.engine != "vllm" or step.cache_for is None:
        return None
    peaks, _ = Sweep(step.tape).peaks()
    weights = sum(nbytes for _, nbytes in model_weights(step, "prefill"))
    served = Served(spec, step, weights, peaks["prefill"][0] if "prefill" in peaks else 0)
    return lambda length: kv_pool(served, setup, gpu, length + setup.max_new_tokens)


def _said(batch: int, context: int, reserved: int, pool: EnginePool | None = None) -> Serving:
    return Serving(largest_batch=batch, longest_context=context, engine_reserved_bytes=reserved, pool=pool)


def _pool(pool: Pool, setup: InferenceSetup, gpu: Gpu, step: Step) -> EnginePool:
    assert step.cache_for is not None
    needed = pool.taken + cache_bytes(setup, step, setup.batch, step.seq_len)
    share = -(-needed * 100 // gpu.usable_bytes) / 100
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
