"""For which jobs the allocator is simulated."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memcalc.setup.setup import InferenceSetup, TrainingSetup
from memcalc.training.traced_step import Step

if TYPE_CHECKING:
    from memcalc.tables.gpus import Gpu


def not_simulated(step: Step, setup: TrainingSetup | InferenceSetup, gpu: Gpu | None) -> str | None:
    """Why the allocator of a job is not simulated, in words that follow "because"; None where it is."""
    if not isinstance(setup, TrainingSetup):
        return "it is simulated for training"
    if step.engine is not None or step.placement is not None:
        return "it is simulated for jobs on one GPU"
    if step.network.input_kind == "latents":
        return "it is not simulated for denoisers"
    if setup.objective != "sft":
        return "it is simulated for --objective sft"
    if step.steps_in_backward:
        return "it is not simulated where the optimizer steps in backward"
    if setup.activation_offloading:
        return "it is not simulated where activations are offloaded"
    if gpu is not None and gpu.architecture.startswith("gfx"):
        return "it is simulated for NVIDIA GPUs"
    if gpu is None and setup.alloc_conf is None:
        return "name a --gpu to have it simulated"
    return None
