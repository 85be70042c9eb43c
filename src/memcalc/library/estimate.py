"""`estimate`, with the type of its report for each way to call it."""

from collections.abc import Sequence
from typing import Any, overload

from memcalc.common.assumption import Assumption
from memcalc.estimation import estimate as estimation
from memcalc.library.report import (
    InferenceReport,
    InferenceReportOnGpu,
    Job,
    Report,
    TrainingReport,
    TrainingReportOnGpu,
)
from memcalc.models import spec as models
from memcalc.setup.setup import InferenceSetup, TrainingSetup
from memcalc.tables.gpus import Gpu


@overload
def estimate(
    spec: models.ModelSpec,
    setup: TrainingSetup,
    gpu: None = None,
    *,
    assumptions: Sequence[Assumption] = (),
    teacher: models.ModelSpec | None = None,
) -> TrainingReport: ...


@overload
def estimate(
    spec: models.ModelSpec,
    setup: TrainingSetup,
    gpu: Gpu | str,
    *,
    assumptions: Sequence[Assumption] = (),
    teacher: models.ModelSpec | None = None,
) -> TrainingReportOnGpu: ...


@overload
def estimate(
    spec: models.ModelSpec, setup: InferenceSetup, gpu: None = None, *, assumptions: Sequence[Assumption] = ()
) -> InferenceReport: ...


@overload
def estimate(
    spec: models.ModelSpec, setup: InferenceSetup, gpu: Gpu | str, *, assumptions: Sequence[Assumption] = ()
) -> InferenceReportOnGpu: ...


@overload
def estimate(
    spec: models.ModelSpec,
    setup: TrainingSetup | InferenceSetup,
    gpu: Gpu | str | None = None,
    *,
    assumptions: Sequence[Assumption] = (),
    teacher: models.ModelSpec | None = None,
) -> Report: ...


def estimate(
    spec: models.ModelSpec,
    setup: TrainingSetup | InferenceSetup,
    gpu: Gpu | str | None = None,
    *,
    assumptions: Sequence[Assumption] = (),
    teacher: models.ModelSpec | None = None,
) -> Report:
    """The memory that one optimizer step, or prefill and one decoded token, needs on one GPU.

    Args:
        spec: the model.
        setup: what is run.
        gpu: the GPU to fit, or its name or size as `find_gpu` takes them.
        assumptions: what the caller has assumed, to be said in the report.
        teacher: the model that distillation asks.

    Raises:
        MemcalcError: an argument is of a wrong type, or the model or the combination of options cannot be answered for.
    """
    found = estimation.estimate(spec, setup, gpu, assumptions=assumptions, teacher=teacher)
    of_training = isinstance(setup, TrainingSetup)
    kinds: dict[tuple[bool, bool], type[Report]] = {
        (True, False): TrainingReport,
        (True, True): TrainingReportOnGpu,
        (False, False): InferenceReport,
        (False, True): InferenceReportOnGpu,
    }
    values: dict[str, Any] = dict(found)  # checked already
    report = kinds[of_training, gpu is not None].model_construct(found.model_fields_set, **values)
    report._job = Job(spec, setup, gpu, tuple(assumptions), teacher)
    return report
