"""A training job through the allocator: for which jobs that is computed, and what comes out."""

from __future__ import annotations

from contextlib import suppress
from functools import lru_cache, partial
from typing import TYPE_CHECKING

from memcalc.allocator.caching import OutOfDeviceMemory
from memcalc.allocator.conf import AllocatorConf, parse_alloc_conf
from memcalc.allocator.simulation import simulate
from memcalc.allocator.smallest_device import smallest_capacity
from memcalc.allocator.training_events import TrainingEvents, training_events
from memcalc.breakdown.process_memory import AllocatorCounters
from memcalc.models.spec import ModelSpec, SpecKey
from memcalc.setup.setup import InferenceSetup, TrainingSetup
from memcalc.tables.cuda_devices import UNNAMED, CudaDevice, cuda_device
from memcalc.tables.overheads import workspace_of
from memcalc.training.step import trace
from memcalc.training.traced_step import Step, Tracing
from memcalc.units import parse_size

if TYPE_CHECKING:
    from memcalc.tables.gpus import Gpu


def conf_of(setup: TrainingSetup | InferenceSetup) -> AllocatorConf:
    """The settings of the allocator that a setup names. Raises UsageError."""
    return parse_alloc_conf(setup.alloc_conf or "")


def job_events(spec: ModelSpec, step: Step, gpu: Gpu | None) -> TrainingEvents:
    """What the job of a traced step asks of the allocator on a GPU (None: one that nothing is said of)."""
    setup = step.setup
    assert isinstance(setup, TrainingSetup)
    device = UNNAMED if gpu is None else cuda_device(gpu.name, gpu.compute_capability)
    given = setup.cublas_workspace
    workspace = workspace_of(gpu).nbytes if given is None else parse_size(given)
    return _events(spec.key, setup, frozenset(setup.model_fields_set), device, workspace)


@lru_cache(maxsize=4)
def _events(
    key: SpecKey, setup: TrainingSetup, given: frozenset[str], device: CudaDevice, workspace: int
) -> TrainingEvents:
    traced = partial(_traced, key.spec, setup, device)
    return training_events(traced, setup.grad_accum, workspace)


def _traced(spec: ModelSpec, setup: TrainingSetup, device: CudaDevice, accumulated: bool, every_block: bool) -> Step:
    """One micro-batch of a job, after others of its step or not."""
    one = setup.model_copy(update={"grad_accum": 2 if accumulated else 1})
    return trace(spec, one, tracing=Tracing(device, every_block))


FAR_ABOVE = 1.1
"""Where more than so many times what is allocated is reserved, the report says what lowers it."""


def counters(
    spec: ModelSpec, step: Step, gpu: Gpu | None, limit: int | None, *, advise: bool = False
) -> AllocatorCounters:
    """What PyTorch's allocator says of a training job.

    `limit` is what the job may take of the GPU, in bytes: where it would reserve more, it is run on that much, and the
    counters are those of that run if there is room after cached memory was given back. With `advise`, what would lower
    the reserve is simulated too where it is far above what is allocated.
    """
    job, conf = job_events(spec, step, gpu), conf_of(step.setup)
    run = simulate(job, conf)
    if limit is not None and run.allocated <= limit < run.reserved:
        with suppress(OutOfDeviceMemory):
            run = simulate(job, conf, limit)
    lower: list[tuple[str, int]] = []
    if advise and run.reserved > FAR_ABOVE * run.allocated:
        if not conf.expandable_segments:
            lower.append(
                ("--alloc-conf expandable_segments:True", simulate(job, parse_alloc_conf(EXPANDABLE)).reserved)
            )
        lower.append(("torch.cuda.empty_cache() after the first step", simulate(job, conf, empty_cache=True).reserved))
    helps = tuple((how, reserved) for how, reserved in lower if reserved < run.reserved)
    return AllocatorCounters(run.allocated, run.reserved, len(run.steps), helps)


EXPANDABLE = "expandable_segments:True"


def needed(spec: ModelSpec, step: Step, gpu: Gpu | None) -> int:
    """Bytes of the smallest device on which a training job runs, CUDA context excluded."""
    job, conf = job_events(spec, step, gpu), conf_of(step.setup)
    return smallest_capacity(job, simulate(job, conf), conf)
