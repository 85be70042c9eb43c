"""A training job through the allocator: for which jobs that is computed, and what comes out."""

from __future__ import annotations

from functools import lru_cache, partial
from typing import TYPE_CHECKING

from memcalc.allocator.conf import AllocatorConf, parse_alloc_conf
from memcalc.allocator.simulation import Simulated, simulate
from memcalc.allocator.training_events import TrainingEvents, training_events
from memcalc.models.common.denoiser import Denoiser
from memcalc.models.spec import ModelSpec, SpecKey
from memcalc.setup.setup import InferenceSetup, TrainingSetup
from memcalc.tables.cuda_devices import UNNAMED, CudaDevice, cuda_device
from memcalc.tables.overheads import workspace_of
from memcalc.training.step import trace
from memcalc.training.traced_step import Step, Tracing
from memcalc.units import parse_size

if TYPE_CHECKING:
    from memcalc.tables.gpus import Gpu


def not_simulated(step: Step, setup: TrainingSetup | InferenceSetup, gpu: Gpu | None) -> str | None:
    """Why the allocator of a job is not simulated, in words that follow "because"; None where it is."""
    if not isinstance(setup, TrainingSetup):
        return "it is simulated for training"
    if step.engine is not None:
        return "it is simulated for jobs on one GPU"
    if isinstance(step.network, Denoiser):
        return "it is not simulated for denoisers"
    if setup.objective != "sft":
        return "it is simulated for --objective sft"
    if step.steps_in_backward:
        return "it is not simulated where the optimizer steps in backward"
    if setup.activation_offloading:
        return "it is not simulated where activations are offloaded"
    if gpu is not None and gpu.architecture.startswith("gfx"):
        return "it is simulated for NVIDIA GPUs"
    return None


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


def simulated(spec: ModelSpec, step: Step, gpu: Gpu | None) -> Simulated:
    """The run of a training job through the allocator, without a limit of memory."""
    return simulate(job_events(spec, step, gpu), conf_of(step.setup))
