"""What is asked: a model, what is run, on which GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from memcalc.common.arguments import check_type
from memcalc.models.spec import ModelSpec
from memcalc.setup.setup import InferenceSetup, TrainingSetup

if TYPE_CHECKING:
    from memcalc.tables.gpus import Gpu

Setup = TrainingSetup | InferenceSetup


class Job(NamedTuple):
    """A model, what is run, the GPU to fit if one is named, and the model that distillation asks."""

    spec: ModelSpec
    setup: Setup
    gpu: Gpu | None
    teacher: ModelSpec | None = None


def found_gpu(gpu: Gpu | str) -> Gpu:
    """The GPU that is meant. Raises UsageError."""
    from memcalc.tables.gpus import Gpu, find_gpu

    check_type("gpu", gpu, (Gpu, str), "a GPU's name or size, or what find_gpu gives")
    return find_gpu(gpu) if isinstance(gpu, str) else gpu
