"""The GPUs of a serving engine that differ: one of each stage that can be the most loaded."""

from __future__ import annotations

from memcalc.inference.generate import generate
from memcalc.inference.served_model import served_model
from memcalc.models.spec import ModelSpec
from memcalc.parallel.setup import ParallelSetup
from memcalc.setup.setup import InferenceSetup
from memcalc.tables.gpus import Gpu
from memcalc.training.traced_step import Step


def served_ranks(spec: ModelSpec, setup: InferenceSetup, gpu: Gpu | None) -> tuple[dict[int, Step], ParallelSetup]:
    """The step of a GPU of each stage, and how the engine is laid out.

    The first stage has the embedding, the last the head, the last but one most blocks; others only where all are asked
    for. Raises MemcalcError.
    """
    stages = setup.pipeline_parallel_size
    chosen = range(stages) if setup.ranks == "all" else sorted({0, max(0, stages - 2), stages - 1})
    models = {stage: served_model(spec, setup, gpu, stage) for stage in chosen}
    found = models[0].layout
    inside = found.attention != found.tensor  # data parallel attention takes none of its own
    layout = ParallelSetup(
        data=1 if inside else found.data, tensor=found.tensor, pipeline=stages, expert=found.expert_ranks
    )
    return {stage: generate(spec, setup, model) for stage, model in models.items()}, layout
