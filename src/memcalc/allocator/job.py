"""A job through the allocator: what it asks for, and what comes out."""

from __future__ import annotations

from contextlib import suppress
from functools import lru_cache, partial
from typing import TYPE_CHECKING

from memcalc.allocator.caching import OutOfDeviceMemory
from memcalc.allocator.conf import AllocatorConf, parse_alloc_conf
from memcalc.allocator.events import Events, JobEvents, RunEvents
from memcalc.allocator.inference_events import decoded_tokens, inference_events
from memcalc.allocator.loading import loaded_on_gpu, moved
from memcalc.allocator.simulation import Simulated, simulate
from memcalc.allocator.smallest_device import smallest_capacity
from memcalc.allocator.training_events import training_events
from memcalc.breakdown.process_memory import AllocatorCounters
from memcalc.models.spec import ModelSpec, SpecKey
from memcalc.nn.module import Module
from memcalc.nn.stack import every_block_by_itself
from memcalc.setup.lengths import drawn_lengths, of_length, said
from memcalc.setup.setup import InferenceSetup, TrainingSetup
from memcalc.tables.cuda_devices import UNNAMED, CudaDevice, cuda_device
from memcalc.tables.overheads import workspace_of
from memcalc.training.step import trace
from memcalc.training.traced_step import Step, Tracing
from memcalc.units import counted, parse_size

if TYPE_CHECKING:
    from memcalc.inference.served_model import ServedModel
    from memcalc.tables.gpus import Gpu


def conf_of(setup: TrainingSetup | InferenceSetup) -> AllocatorConf:
    """The settings of the allocator that a setup names. Raises UsageError."""
    return parse_alloc_conf(setup.alloc_conf or "")


def job_events(spec: ModelSpec, step: Step, gpu: Gpu | None, teacher: ModelSpec | None = None) -> JobEvents | RunEvents:
    """What the job of a traced step asks of the allocator on a GPU (None: one that nothing is said of)."""
    setup = step.setup
    if isinstance(setup, InferenceSetup):
        return generation_events(spec, setup.model_copy(update={"seq_len": step.seq_len}), gpu)
    fields = frozenset(setup.model_fields_set)
    return _training(spec.key, setup, fields, *_device(setup, gpu), None if teacher is None else teacher.key)


def generation_events(spec: ModelSpec, setup: InferenceSetup, gpu: Gpu | None) -> JobEvents:
    """What prefill and decoding ask for."""
    return _generation(spec.key, setup, frozenset(setup.model_fields_set), *_device(setup, gpu))


def _device(setup: TrainingSetup | InferenceSetup, gpu: Gpu | None) -> tuple[CudaDevice, int]:
    """What kernels know of a GPU, and bytes of the workspace that cuBLAS asks for on it."""
    device = UNNAMED if gpu is None else cuda_device(gpu.name, gpu.compute_capability)
    given = setup.cublas_workspace
    return device, workspace_of(gpu).nbytes if given is None else parse_size(given)


@lru_cache(maxsize=4)
def _training(
    key: SpecKey,
    setup: TrainingSetup,
    given: frozenset[str],
    device: CudaDevice,
    workspace: int,
    teacher: SpecKey | None,
) -> JobEvents | RunEvents:
    if setup.lengths is not None:
        from memcalc.allocator.run_of_lengths import run_events  # a job of one length does not pay for it

        of_any = partial(_micro_batch_of_length, key.spec, setup, device, None if teacher is None else teacher.spec)
        return run_events(of_any, drawn_lengths(setup), workspace)
    traced = partial(traced_micro_batch, key.spec, setup, device, None if teacher is None else teacher.spec)
    return training_events(traced, setup.grad_accum, workspace)


def traced_micro_batch(
    spec: ModelSpec,
    setup: TrainingSetup,
    device: CudaDevice,
    teacher: ModelSpec | None,
    accumulated: bool,
    every_block: bool,
) -> Step:
    """One micro-batch of a job, after others of its step or not."""
    one = setup.model_copy(update={"grad_accum": 2 if accumulated else 1})
    return trace(spec, one, tracing=Tracing(device, every_block), teacher=teacher)


def _micro_batch_of_length(  # noqa: PLR0913 (the same for one length)
    spec: ModelSpec,
    setup: TrainingSetup,
    device: CudaDevice,
    teacher: ModelSpec | None,
    length: int,
    accumulated: bool,
    every_block: bool,
) -> Step:
    return traced_micro_batch(spec, of_length(setup, length), device, teacher, accumulated, every_block)


@lru_cache(maxsize=4)
def _generation(
    key: SpecKey, setup: InferenceSetup, given: frozenset[str], device: CudaDevice, workspace: int
) -> JobEvents:
    model = _served(key, setup.model_copy(update={"batch": 1, "seq_len": None}), given)
    load = partial(_loading, on_cpu=setup.load_on == "cpu")
    return inference_events(partial(_prompt_and_tokens, key.spec, setup, model, device), workspace, load)


@lru_cache(maxsize=2)
def _served(key: SpecKey, setup: InferenceSetup, given: frozenset[str]) -> ServedModel:
    """A model that serves every batch and length."""
    from memcalc.inference.served_model import served_model

    return served_model(key.spec, setup)


@lru_cache(maxsize=2)
def _loading(model: Module, *, on_cpu: bool) -> Events:
    return moved(model) if on_cpu else loaded_on_gpu(model)


def _prompt_and_tokens(
    spec: ModelSpec, setup: InferenceSetup, model: ServedModel, device: CudaDevice, every_block: bool
) -> Step:
    from memcalc.inference.generate import generate
    from memcalc.inference.served_model import served_model

    if every_block:
        with every_block_by_itself():
            model = served_model(spec, setup)
    decoded = decoded_tokens(setup.max_new_tokens)
    return generate(spec, setup, model, tracing=Tracing(device, every_block, decoded=decoded))


FAR_ABOVE = 1.1
"""Where more than so many times what is allocated is reserved, the report says what lowers it."""


def counters(
    spec: ModelSpec,
    step: Step,
    gpu: Gpu | None,
    limit: int | None,
    *,
    teacher: ModelSpec | None = None,
    advise: bool = False,
) -> AllocatorCounters:
    """What PyTorch's allocator says of a job.

    `limit` is what the job may take of the GPU, in bytes: where it would reserve more, it is run on that much, and the
    counters are those of that run if there is room after cached memory was given back. With `advise`, what would lower
    the reserve is simulated too where it is far above what is allocated.
    """
    job, conf = job_events(spec, step, gpu, teacher), conf_of(step.setup)
    run = _without_limit(job, conf)
    if limit is not None and run.allocated <= limit < run.reserved:
        with suppress(OutOfDeviceMemory):
            run = simulate(job, conf, limit)
    lower: list[tuple[str, int]] = []
    if advise and run.reserved > FAR_ABOVE * run.allocated:
        if not conf.expandable_segments:
            lower.append(
                ("--alloc-conf expandable_segments:True", simulate(job, parse_alloc_conf(EXPANDABLE)).reserved)
            )
        after = "the first step" if step.training else "the first prompt"
        if isinstance(job, RunEvents):
            after = "every step"
        lower.append((f"torch.cuda.empty_cache() after {after}", simulate(job, conf, empty_cache=True).reserved))
    beyond = limit is not None and run.reserved > limit
    helps = tuple((how, reserved) for how, reserved in lower if reserved < run.reserved)
    by_step = tuple(max(peaks.reserved.values()) for peaks in run.steps) if isinstance(job, RunEvents) else ()
    return AllocatorCounters(run.allocated, run.reserved, _ran(step.setup, len(run.steps)), helps, by_step, beyond)


def _ran(setup: TrainingSetup | InferenceSetup, count: int) -> str:
    """What was simulated, in words."""
    if isinstance(setup, TrainingSetup) and setup.lengths is not None:
        return f"{count} steps of lengths {said(setup.lengths)}, seed {setup.seed}"
    if isinstance(setup, TrainingSetup):
        return f"{count} equal steps"
    tokens = len(decoded_tokens(setup.max_new_tokens)) + 1
    return f"{count} equal prompts, each with {counted(tokens, 'token')} after it"


EXPANDABLE = "expandable_segments:True"


QUICK = 20_000
"""Requests and frees of a step on one stream up to which the smallest device is found in the time of an answer."""


def needed(
    spec: ModelSpec, step: Step, gpu: Gpu | None, teacher: ModelSpec | None = None, *, quickly: bool = False
) -> int | None:
    """Bytes of the smallest device on which a job runs, CUDA context excluded; None where it takes long."""
    job, conf = job_events(spec, step, gpu, teacher), conf_of(step.setup)
    if quickly and (isinstance(job, RunEvents) or job.streams or len(job.later.codes) > QUICK):
        return None
    return smallest_capacity(job, _without_limit(job, conf), conf)


@lru_cache(maxsize=4)
def _without_limit(job: JobEvents | RunEvents, conf: AllocatorConf) -> Simulated:
    return simulate(job, conf)
