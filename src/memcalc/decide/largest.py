"""The largest job that fits, found by estimating: one more does not fit."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

from memcalc.common.largest_fit import ENDLESS, LIMIT, largest_fit
from memcalc.errors import MemcalcError
from memcalc.estimation.process import process_bytes, usable_bytes
from memcalc.models.spec import ModelSpec
from memcalc.setup.setup import InferenceSetup, TrainingSetup
from memcalc.tables.gpus import GPUS, Gpu

Setup = TrainingSetup | InferenceSetup


@dataclass(frozen=True)
class Largest:
    """The largest value of an option with which a job fits; 0 where not even one does."""

    field: str
    value: int
    process_bytes: int
    """Bytes of the process with that value; 0 where none fits."""


def largest(spec: ModelSpec, setup: Setup, gpu: Gpu, field: str) -> Largest:
    """The largest whole number for the option `field`, all else being as in `setup`.

    Memory never falls where these options grow. Values that the model or the setup refuses do not fit.
    """
    sizes: dict[int, int] = {}

    def size(value: int) -> int:
        try:
            sizes[value] = process_bytes(spec, setup.model_copy(update={field: value}), gpu)
        except MemcalcError:
            return ENDLESS
        return sizes[value]

    # Sequences end where the model's positions end.
    limit = min(spec.positions or LIMIT, LIMIT) if field == "seq_len" else LIMIT
    value = largest_fit(size, usable_bytes(setup, gpu), limit)
    return Largest(field, value, sizes.get(value, 0))


def smallest_gpu(spec: ModelSpec, setup: Setup) -> Gpu | None:
    """The GPU with the least memory among those that memcalc knows on which the job fits; None where none does."""
    for gpu in sorted(GPUS, key=lambda gpu: (gpu.usable_bytes, gpu.name)):
        if process_bytes(spec, setup, gpu) <= usable_bytes(setup, gpu):
            return gpu
    return None


MOST_GPUS = 4096
"""No answer takes more GPUs."""


def sharding(setup: TrainingSetup) -> str:
    """The engine by which GPUs would share the job: its own where it shards already, else FSDP2."""
    return "fsdp2" if setup.parallel in (None, "none", "ddp") else setup.parallel


def fewest_gpus(spec: ModelSpec, setup: TrainingSetup, gpu: Gpu, *, teacher: ModelSpec | None = None) -> int | None:
    """How many GPUs like `gpu` share the job, so that it fits each; None where no number up to 4,096 does.

    Sharded by FSDP2 where the setup does not say how, the other axes as in `setup`.
    """

    def fits(number: int, simulate: bool = False) -> bool:
        try:
            several = setup.model_copy(update={"parallel": sharding(setup), "gpus": number * step})
            return process_bytes(spec, several, gpu, teacher, simulate=simulate) <= usable_bytes(several, gpu)
        except MemcalcError:  # such as an option for one GPU, or more ranks than the experts divide by
            return False

    step = (
        setup.tensor_parallel_size
        * setup.context_parallel_size
        * setup.sequence_parallel_size
        * setup.pipeline_parallel_size
    )
    most = MOST_GPUS // step
    if not fits(most):
        return None
    first = _first(fits, 1, most)
    found = None if first is None else _first(lambda number: fits(number, simulate=True), first, most)
    return None if found is None else found * step


def _first(fits: Callable[[int], bool], low: int, most: int) -> int | None:
    """The first number from `low` on that fits, if larger ones do too; None where none does up to `most`."""
    below, number = low - 1, low
    while not fits(number):
        if number >= most:
            return None
        below, number = number, min(number + max(1, number - low + 1), most)
    tried = range(below + 1, number + 1)
    return tried[bisect_left(tried, True, key=fits)]
