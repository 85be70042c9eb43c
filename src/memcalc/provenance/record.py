"""A step as it is told to a recorder."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from memcalc.errors import UsageError
from memcalc.estimation.job import Setup
from memcalc.estimation.traced_steps import most_loaded, tracing_of_pipeline, within_positions
from memcalc.models.spec import ModelSpec
from memcalc.nn.stack import every_block_by_itself
from memcalc.parallel.layout import layout_of
from memcalc.parallel.setup import ParallelSetup
from memcalc.peak.pipeline import trace_rank
from memcalc.peak.ranks import traced_ranks
from memcalc.provenance.origins import Recording
from memcalc.setup.setup import TrainingSetup
from memcalc.tables.gpus import Gpu
from memcalc.training.step import trace
from memcalc.training.traced_step import Step


def record_step(
    spec: ModelSpec,
    setup: Setup,
    recording: Recording,
    teacher: ModelSpec | None = None,
    gpu: Gpu | None = None,
    *,
    every_block: bool = True,
) -> Step:
    """The step as it is told to a recorder; blocks may stand for others. Of a pipeline it is the fullest micro-batch.

    Raises UsageError for a device map.
    """

    def run(setup: Setup) -> Step:
        if setup.device_map is not None:
            raise UsageError(
                "the tensors of a model that --device-map spreads lie on several GPUs, and are listed for one: leave "
                "it out, or ask for an estimate, which says what each holds."
            )
        if isinstance(setup, TrainingSetup):
            layout = layout_of(setup, spec.config)
            if layout.pipeline > 1:
                return _of_pipeline(spec, setup, layout, recording, block_by_block)
            with block_by_block():
                return trace(spec, setup, layout=layout, teacher=teacher, recorder=recording)
        from memcalc.inference.generate import generate

        with block_by_block():
            return generate(spec, setup, recorder=recording, tracing=tracing_of_pipeline(spec, gpu))

    block_by_block: Callable[[], AbstractContextManager[None]] = every_block_by_itself if every_block else nullcontext
    return within_positions(setup, run)


def _of_pipeline(
    spec: ModelSpec,
    setup: TrainingSetup,
    layout: ParallelSetup,
    recording: Recording,
    block_by_block: Callable[[], AbstractContextManager[None]],
) -> Step:
    """The fullest micro-batch of the most loaded rank; the others that are in flight stand beside it."""

    def again(setup: TrainingSetup, layout: ParallelSetup) -> Step:
        with block_by_block():
            return trace(spec, setup, layout=layout, recorder=recording)

    rank = most_loaded(traced_ranks(spec, setup, layout, None))
    return trace_rank(spec, setup, layout, rank, again=again)
