"""One optimizer step as memory sees it: the tape of forward and backward, and what stands around it."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING

from memcalc.errors import UsageError
from memcalc.models.registry import autoencoders, denoisers
from memcalc.models.spec import ModelSpec, SpecKey
from memcalc.nn.retained_graphs import record_retained, retaining_modules
from memcalc.nn.run_context import run_context
from memcalc.parallel import engines
from memcalc.parallel.layout import layout_of
from memcalc.parallel.setup import ParallelSetup
from memcalc.setup.setup import TrainingSetup
from memcalc.tables.optimizers import optimizer
from memcalc.training.forward_backward import forward_backward
from memcalc.training.prepared_model import prepared_model
from memcalc.training.traced_step import PLAIN, Step, Tracing, steps_in_backward
from memcalc.training.trainer_loop import trainer_notes

if TYPE_CHECKING:
    from memcalc.nn.recorder import Recorder

_UNTRACED = {
    "optimizer": "galore-adamw",
    "optimizer_impl": None,
    "cuda_context": None,
    "cublas_workspace": None,
    "cudnn_workspace": None,
    "allocator_reserve": None,
    "alloc_conf": None,
}
"""Fields of a setup that change nothing in forward and backward, with a value that stands for all.

The optimizer is one that takes the options of all others.
"""

UNTRACED_OPTIONS = frozenset(_UNTRACED)
"""Their names: setups that differ in nothing else share one traced step."""


def trace(
    spec: ModelSpec,
    setup: TrainingSetup,
    *,
    layout: ParallelSetup | None = None,
    tracing: Tracing = PLAIN,
    teacher: ModelSpec | None = None,
    recorder: Recorder | None = None,
) -> Step:
    """Run one micro-batch forward and backward on shapes, as one rank of `layout` does (None: the setup's own).

    Setups that differ in what no tape holds (the optimizer) share one run. A `recorder` is told where each allocation
    comes from; its run is shared with nobody.
    """
    asked, setup = setup, setup.with_trainer_defaults()
    if spec.model_type in denoisers():
        from memcalc.training.denoising import as_scripts_train  # language models do not pay for importing it

        setup = as_scripts_train(setup, spec)
    elif spec.model_type in autoencoders():
        raise UsageError(
            f"{spec.model_type} is the autoencoder of a diffusion pipeline, whose training memcalc does not know; use "
            "--mode inference, or give the pipeline or its denoiser."
        )
    layout = layout_of(setup, spec.config) if layout is None else layout
    shared = {} if steps_in_backward(setup) else _UNTRACED
    own = engines.adapter_dtype(setup, layout)
    same = setup.model_copy(update=shared | own | {"grad_accum": min(setup.grad_accum, 2)})
    given = frozenset(same.model_fields_set)  # setups are equal by their values alone, whoever gave them
    run = _trace if recorder is None else partial(_trace.__wrapped__, recorder=recorder)
    step = run(spec.key, same, given, layout, tracing, None if teacher is None else teacher.key)
    notes = (*trainer_notes(asked, setup), *step.notes)
    return replace(step, setup=setup, optimizer=optimizer(setup.optimizer), notes=notes)


@lru_cache(maxsize=64)
def _trace(  # noqa: PLR0913 (all that decides what a step is)
    key: SpecKey,
    setup: TrainingSetup,
    given: frozenset[str],
    layout: ParallelSetup,
    tracing: Tracing,
    teacher: SpecKey | None,
    recorder: Recorder | None = None,
) -> Step:
    model = prepared_model(key.spec, setup, layout, teacher, every_block=tracing.every_block)
    run_once = partial(forward_backward, model, tracing, recorder=recorder)
    step = run_once()
    if step.engine is not None and step.engine.learns:
        step = replace(run_once(before=step.engine), first_run=step)
    if keeping := retaining_modules(model.network):  # what a step leaves behind is there when the next one begins
        record_retained(keeping)
        step = run_once()
        run_context(step.tape).retained_bytes = record_retained(keeping)
    return step
