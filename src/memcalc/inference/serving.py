"""What a GPU can serve: how much of it an engine takes, and how many sequences or tokens that has room for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from memcalc.common.largest_fit import ENDLESS, LIMIT, largest_fit
from memcalc.errors import TooLongError, TooShortError
from memcalc.inference.generate import generate
from memcalc.inference.served_model import served_model
from memcalc.models.spec import ModelSpec
from memcalc.setup.setup import InferenceSetup
from memcalc.tables.engines import ENGINES
from memcalc.tables.gpus import Gpu
from memcalc.training.traced_step import Step


@dataclass(frozen=True)
class Capacity:
    """Largest batch at the setup's length, and longest context at batch one; 0 where not even one fits."""

    batch: int
    context: int


def usable(setup: InferenceSetup, gpu: Gpu) -> int:
    """Bytes of the GPU that the job may take: all, or the share that a serving engine is told to fill."""
    share = setup.gpu_memory_utilization or ENGINES[setup.engine].utilization
    return gpu.usable_bytes if share is None else int(gpu.usable_bytes * share)


def serving(
    spec: ModelSpec, setup: InferenceSetup, gpu: Gpu, step: Step, process_of: Callable[[Step, InferenceSetup], int]
) -> tuple[Capacity, int]:
    """The most sequences at once and the longest context that the GPU has room for, and the bytes that are taken.

    `step` is the job itself, `process_of` says what a job's process takes. The context ends at the positions of the
    model, if they end.
    """
    if step.components:  # a diffusion pipeline has no context
        return _pictures(spec, setup, gpu, step, process_of)
    model = served_model(spec, setup)
    room, here = usable(setup, gpu), process_of(step, setup)

    def size(batch: int, length: int) -> int:
        candidate = setup.model_copy(update={"batch": batch, "seq_len": length})
        try:
            return process_of(generate(spec, candidate, model), candidate)
        except TooLongError:
            return ENDLESS
        except TooShortError:  # longer ones decide
            return 0

    batch = largest_fit(lambda n: size(n, step.seq_len), room, known={setup.batch: here})
    context = 0
    if step.network.reads_text and step.network.source_is_text:
        known = {step.seq_len: here} if setup.batch == 1 else {}
        context = largest_fit(lambda n: size(1, n), room, min(spec.positions or LIMIT, LIMIT), known)
        if context and not size(1, context):  # nothing that fits is long enough
            context = 0
    fills = ENGINES[setup.engine].utilization is not None
    return Capacity(batch, context), room if fills else here


def _pictures(
    spec: ModelSpec, setup: InferenceSetup, gpu: Gpu, step: Step, process_of: Callable[[Step, InferenceSetup], int]
) -> tuple[Capacity, int]:
    """The most prompts of a diffusion pipeline's call, and the bytes that are taken."""

    def size(batch: int) -> int:
        candidate = setup.model_copy(update={"batch": batch})
        return process_of(generate(spec, candidate), candidate)

    here = process_of(step, setup)
    return Capacity(largest_fit(size, usable(setup, gpu), known={setup.batch: here}), 0), here
