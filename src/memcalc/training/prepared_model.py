"""A model as one rank trains it: divided, adapted, and laid on its GPUs; the same for every micro-batch."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

from memcalc.common.assumption import Assumption
from memcalc.models.build import build
from memcalc.models.spec import ModelSpec, SpecKey
from memcalc.nn.model import Network
from memcalc.nn.stack import every_block_by_itself
from memcalc.parallel import engines
from memcalc.parallel.setup import ParallelSetup
from memcalc.setup.setup import TrainingSetup
from memcalc.training.input_sizes import check_sizes, with_frames
from memcalc.training.prepare_model import adapt

if TYPE_CHECKING:
    from memcalc.parallel.placement import Placement


@dataclass(frozen=True)
class PreparedModel:
    """A model that is ready to be trained."""

    spec: ModelSpec
    setup: TrainingSetup
    layout: ParallelSetup
    network: Network
    """What this rank has of the model."""
    teacher: SpecKey | None = None
    """The model that distillation asks."""
    placement: Placement | None = None
    """The GPUs of this process that its modules lie on, where they are several."""
    notes: tuple[Assumption, ...] = ()
    """What is taken for granted about all of this."""


def prepared_model(
    spec: ModelSpec, setup: TrainingSetup, layout: ParallelSetup, teacher: SpecKey | None, *, every_block: bool
) -> PreparedModel:
    """Build the share of `spec` that a rank of `layout` trains; with `every_block` none stands for others.

    Raises MemcalcError where the setup cannot be run.
    """
    if setup.objective != "sft":  # the default does not pay for importing what others need
        from memcalc.training.objectives import run

        spec = run.trained_spec(spec, setup)
    with every_block_by_itself() if every_block else nullcontext():
        network = engines.prepare(spec, layout, build)
    mapped = None
    if layout.device_map is not None:
        from memcalc.training.spread_model import spread  # the others do not pay for it

        mapped = spread(network, setup, layout)
    setup = with_frames(network, setup)
    check_sizes(network, setup)
    notes = adapt(network, spec, setup)
    if network.input_kind == "latents":
        from memcalc.training.denoising import prepare_denoiser

        notes += prepare_denoiser(network, spec, setup, alone=layout.alone)
    if layout.expert > 1:
        from memcalc.parallel.expert_parallel import divide_experts

        divide_experts(network, layout)
    placement = None if mapped is None else mapped(network)
    return PreparedModel(spec, setup, layout, network, teacher, placement, tuple(notes))
