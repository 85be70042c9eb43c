"""What the process of a job holds on its GPU: tensors, what the allocator reserves, the CUDA context; and what fits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memcalc.allocator.simulated_jobs import not_simulated
from memcalc.breakdown.process_memory import ProcessMemory
from memcalc.errors import UsageError
from memcalc.estimation.job import Job, Setup
from memcalc.estimation.traced_steps import most_loaded, traced_steps
from memcalc.models.spec import ModelSpec
from memcalc.parallel.setup import ParallelSetup
from memcalc.peak.ranks import phase_totals
from memcalc.report.cluster import communicators
from memcalc.report.gpu_schema import GpuFit
from memcalc.report.schema import Report
from memcalc.setup.setup import InferenceSetup, TrainingSetup
from memcalc.training.traced_step import Step

if TYPE_CHECKING:
    from memcalc.tables.gpus import Gpu


def process_memory_of(
    job: Job, step: Step, tensors: int, layout: ParallelSetup, *, simulate: bool = True, advise: bool = False
) -> ProcessMemory:
    """What the process of a traced step holds, whose tensors peak at `tensors` bytes. Raises UsageError."""
    spec, setup, gpu, teacher = job
    memory = ProcessMemory.for_job(step.input_bytes, setup, gpu, tensors, communicators(layout))
    if setup.allocator_reserve is not None:
        if setup.alloc_conf is not None:
            raise UsageError(
                "--allocator-reserve says what the allocator holds, which --alloc-conf has simulated; leave one out."
            )
        return memory
    why = not_simulated(step, setup, gpu)
    if why is not None and setup.alloc_conf is not None:
        raise UsageError(f"--alloc-conf sets up PyTorch's allocator, but {why}; leave it out.")
    lengths = setup.lengths if isinstance(setup, TrainingSetup) else None
    if why is not None and lengths is not None:
        raise UsageError(
            f"--lengths simulates PyTorch's allocator, and {why}; give --seq-len with the longest length in its place."
        )
    limit = None if gpu is None else usable_bytes(setup, gpu) - memory.context - memory.nccl
    if limit is not None and memory.counted > limit and (setup.alloc_conf, lengths) == (None, None):
        why = why or "not simulated: no allocator makes its tensors fit"
    if why is not None or not simulate:
        return memory.with_counters(None, why or "not simulated here")
    from memcalc.allocator.job import counters

    return memory.with_counters(counters(spec, step, gpu, limit, teacher=teacher, advise=advise))


def usable_bytes(setup: Setup, gpu: Gpu) -> int:
    """Bytes of the GPU that the job may take."""
    if isinstance(setup, TrainingSetup):
        return gpu.usable_bytes
    from memcalc.inference.serving import usable

    return usable(setup, gpu)


def gpu_fit(job: Job, gpu: Gpu, step: Step, process: int) -> GpuFit:
    """How a process of `process` bytes fits what the job may take; what vLLM leaves of its pool is what is free."""
    usable = usable_bytes(job.setup, gpu)
    if isinstance(job.setup, InferenceSetup):
        from memcalc.report.serving import free_bytes

        usable = max(0, process + free_bytes(job.spec, job.setup, gpu, step, process))
    return GpuFit.of(gpu.name, gpu.total_bytes, usable, process)


def process_bytes(
    spec: ModelSpec, setup: Setup, gpu: Gpu, teacher: ModelSpec | None = None, *, simulate: bool = True
) -> int:
    """The bytes that have to be within `usable_bytes`, and nothing else: what a search asks. Raises MemcalcError.

    Without `simulate` what the allocator reserves is estimated, in less time.
    """
    job = Job(spec, setup, gpu, teacher)
    step, memory = process_memory(job, simulate=simulate)
    return usable_bytes(setup, gpu) - gpu_fit(job, gpu, step, memory.process).free_bytes


def process_memory(job: Job, *, simulate: bool = True) -> tuple[Step, ProcessMemory]:
    """The traced step of the rank that holds most, and what its process takes. Raises MemcalcError."""
    steps, layout = traced_steps(job)
    step = steps[most_loaded(steps)]
    return step, process_memory_of(job, step, max(phase_totals(step).values()), layout, simulate=simulate)


def needed_bytes(
    spec: ModelSpec, setup: Setup, gpu: Gpu, teacher: ModelSpec | None = None, *, quickly: bool = False
) -> int | None:
    """Bytes of the smallest GPU like `gpu` on which a job runs, CUDA context included; None if that is not simulated,
    and with `quickly` where it takes longer than the answer.

    Raises MemcalcError.
    """
    from memcalc.allocator.job import needed

    steps, layout = traced_steps(Job(spec, setup, gpu, teacher))
    step = steps[most_loaded(steps)]
    if setup.allocator_reserve is not None or not_simulated(step, setup, gpu) is not None:
        return None
    memory = ProcessMemory.for_job(step.input_bytes, setup, gpu, 0, communicators(layout))
    least = needed(spec, step, gpu, teacher, quickly=quickly)
    return None if least is None else least + memory.context + memory.nccl


def with_needed_bytes(
    report: Report, spec: ModelSpec, setup: Setup, gpu: Gpu, teacher: ModelSpec | None = None, *, quickly: bool = False
) -> Report:
    """The report of a job with the smallest memory on which it runs, for which it is simulated some five times more.

    With `quickly` only where that takes no longer than the answer.
    """
    assert report.gpu is not None
    if quickly and not any(said.code == "allocator_simulated" for said in report.assumptions):
        return report
    least = needed_bytes(spec, setup, gpu, teacher, quickly=quickly)
    found = report.gpu.model_copy(update={"needed_bytes": least})
    return report.model_copy(update={"gpu": found})
