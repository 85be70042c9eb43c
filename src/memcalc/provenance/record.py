"""A step as it is told to a recorder."""

from __future__ import annotations

from contextlib import nullcontext

from memcalc.errors import UsageError
from memcalc.estimation.job import Setup
from memcalc.estimation.traced_steps import tracing_of_pipeline, within_positions
from memcalc.models.spec import ModelSpec
from memcalc.nn.stack import every_block_by_itself
from memcalc.parallel.layout import layout_of
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
    """The step as it is told to a recorder; blocks may stand for others.

    Raises UsageError for a pipeline, and for a device map.
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
                raise UsageError(
                    "a rank of a pipeline holds many micro-batches, of which one is traced: its tensors cannot be "
                    "listed; leave out --pipeline-parallel-size."
                )
            return trace(spec, setup, layout=layout, teacher=teacher, recorder=recording)
        from memcalc.inference.generate import generate

        return generate(spec, setup, recorder=recording, tracing=tracing_of_pipeline(spec, gpu))

    with every_block_by_itself() if every_block else nullcontext():
        return within_positions(setup, run)
