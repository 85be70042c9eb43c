"""The steps of a job that are traced: one for each kind of rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeVar

from memcalc.errors import TooLongError, UsageError
from memcalc.estimation.job import Job, Setup, found_gpu
from memcalc.models.registry import autoencoders, denoisers
from memcalc.models.spec import ModelSpec
from memcalc.parallel.layout import free_bytes, layout_of
from memcalc.parallel.setup import SINGLE, ParallelSetup
from memcalc.peak.ranks import cards_of, phase_totals, traced_ranks, with_loading
from memcalc.setup.setup import InferenceSetup, TrainingSetup
from memcalc.tables.cuda_devices import cuda_device
from memcalc.training.traced_step import PLAIN, Step, Tracing

if TYPE_CHECKING:
    from memcalc.tables.gpus import Gpu

Ran = TypeVar("Ran")


def traced_steps(job: Job) -> tuple[dict[int, Step], ParallelSetup]:
    """The traced steps of the ranks that differ, and how the job is laid out over GPUs. Raises MemcalcError."""
    return within_positions(job.setup, lambda setup: _traced(job._replace(setup=setup)))


def most_loaded_step(
    spec: ModelSpec, setup: Setup, teacher: ModelSpec | None = None, gpu: Gpu | str | None = None
) -> Step:
    """The traced step that `estimate` reports: that of the rank that holds most."""
    steps, _ = traced_steps(Job(spec, setup, None if gpu is None else found_gpu(gpu), teacher))
    return steps[most_loaded(steps)]


def most_loaded(steps: Mapping[int, Step]) -> int:
    """The rank whose tensors take most at their peak."""
    if len(steps) == 1:
        return min(steps)
    return max(steps, key=lambda rank: max(phase_totals(steps[rank]).values()))


def within_positions(setup: Setup, run: Callable[[Setup], Ran]) -> Ran:
    """What `run` makes of a setup, whose length is no more than the model has positions for where nobody named it."""
    try:
        return run(setup)
    except TooLongError as problem:
        later = setup.max_new_tokens - 1 if isinstance(setup, InferenceSetup) else 0
        many = isinstance(setup, TrainingSetup) and setup.lengths is not None
        if setup.seq_len is not None or many or problem.longest <= later:
            raise
        shorter = setup.model_copy(update={"seq_len": problem.longest - later})
    return run(shorter)


def _traced(job: Job) -> tuple[dict[int, Step], ParallelSetup]:
    spec, setup, gpu, teacher = job
    if teacher is not None and not (isinstance(setup, TrainingSetup) and setup.objective in ("distillation", "gkd")):
        raise UsageError("--teacher belongs to --objective distillation or gkd of --mode training; leave it out.")
    if isinstance(setup, TrainingSetup):
        layout = layout_of(setup, spec.config, None if gpu is None else free_bytes(setup, gpu))
        return traced_ranks(spec, setup, layout, teacher), layout
    from memcalc.inference.generate import generate  # training, the default, does not pay for importing it
    from memcalc.inference.served_model import served_model
    from memcalc.inference.served_ranks import served_ranks

    if setup.pipeline_parallel_size > 1 or setup.tensor_parallel_size > 1 or (setup.data_parallel_size or 1) > 1:
        return served_ranks(spec, setup, gpu)
    step = generate(spec, setup, served_model(spec, setup, gpu), tracing=tracing_of_pipeline(spec, gpu))
    layout = SINGLE if step.placement is None else ParallelSetup(device_map=step.placement.ask)
    return {card: with_loading(own) for card, own in cards_of(step).items()}, layout


def tracing_of_pipeline(spec: ModelSpec, gpu: Gpu | None) -> Tracing:
    """How a diffusion pipeline's call is traced: with the kernels of the GPU that was named. Other models have none."""
    if gpu is None or spec.model_type not in (*denoisers(), *autoencoders()):
        return PLAIN
    return Tracing(cuda_device(gpu.name, gpu.compute_capability))
