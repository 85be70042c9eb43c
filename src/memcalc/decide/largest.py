"""The largest job that fits, by bisection on the estimate itself: one more does not fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from memcalc.errors import MemcalcError
from memcalc.estimation import estimate
from memcalc.models.spec import ModelSpec
from memcalc.setup.setup import InferenceSetup, TrainingSetup
from memcalc.tables.gpus import GPUS, Gpu

MOST = 1 << 24
"""No answer is larger."""

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

    def fits(value: int) -> bool:
        try:
            report = estimate(spec, changed(setup, **{field: value}), gpu)
        except MemcalcError:
            return False
        sizes[value] = report.peak.process_bytes
        return report.gpu is not None and report.gpu.fits

    value = _bisect(fits, _limit(spec, field))
    return Largest(field, value, sizes.get(value, 0))


def smallest_gpu(spec: ModelSpec, setup: Setup) -> Gpu | None:
    """The GPU with the least memory among those that memcalc knows on which the job fits; None where none does."""
    for gpu in sorted(GPUS, key=lambda gpu: (gpu.usable_bytes, gpu.name)):
        report = estimate(spec, setup, gpu)
        if report.gpu is not None and report.gpu.fits:
            return gpu
    return None


def changed(setup: Setup, **options: object) -> Setup:
    """`setup` with other options, checked anew. Raises UsageError."""
    return type(setup)(**{**setup.model_dump(exclude_unset=True), **options})


def _limit(spec: ModelSpec, field: str) -> int:
    """Sequences end where the model's positions end."""
    return min(spec.positions or MOST, MOST) if field == "seq_len" else MOST


def _bisect(holds: Callable[[int], bool], limit: int) -> int:
    """The largest n up to `limit` for which `holds`, 0 where it does not for one."""
    low, high = 0, 1
    while high < limit and holds(high):
        low, high = high, min(2 * high, limit)
    if high == limit and holds(limit):
        return limit
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
