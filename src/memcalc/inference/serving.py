"""What a GPU can serve: how much of it an engine takes, and how many sequences or tokens that has room for."""

from __future__ import annotations

from collections.abc import Callable

from memcalc.errors import TooLongError, TooShortError
from memcalc.inference.generate import generate
from memcalc.inference.largest_fit import LIMIT, Capacity, capacity, largest
from memcalc.models.spec import ModelSpec
from memcalc.setup.setup import InferenceSetup
from memcalc.tables.engines import ENGINES
from memcalc.tables.gpus import Gpu
from memcalc.training.traced_step import Step


def usable(setup: InferenceSetup, gpu: Gpu) -> int:
    """Bytes of the GPU that the job may take: all, or the share that a serving engine is told to fill."""
    share = setup.gpu_memory_utilization or ENGINES[setup.engine].utilization
    return gpu.usable_bytes if share is None else int(gpu.usable_bytes * share)


def serving(
    spec: ModelSpec, setup: InferenceSetup, gpu: Gpu, step: Step, process_of: Callable[[Step, InferenceSetup], int]
) -> tuple[Capacity, int]:
    """The most sequences at once and the longest context that the GPU has room for, and the bytes that are taken.

    `step` is the job itself, `process_of` says what a job's process takes.
    """

    def fits(candidate: InferenceSetup) -> bool:
        try:
            return process_of(generate(spec, candidate), candidate) <= usable(candidate, gpu)
        except TooLongError:
            return False
        except TooShortError:  # longer ones decide
            return True

    def runs(length: int) -> bool:
        try:
            generate(spec, setup.model_copy(update={"batch": 1, "seq_len": length}))
        except TooShortError:
            return False
        return True

    if step.components:  # a diffusion pipeline has no context
        batch = largest(lambda n: fits(setup.model_copy(update={"batch": n})), LIMIT)
        return Capacity(batch, 0), process_of(step, setup)
    found = capacity(setup, step.seq_len, fits, spec.positions)
    counts_tokens = step.network.reads_text and step.network.source_is_text
    context = found.context if counts_tokens and found.context and runs(found.context) else 0
    fills = ENGINES[setup.engine].utilization is not None
    occupied = usable(setup, gpu) if fills else process_of(step, setup)
    return Capacity(found.batch, context), occupied
