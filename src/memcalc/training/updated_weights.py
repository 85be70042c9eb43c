"""The weights that an optimizer updates, as it sees them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from memcalc.autograd.tape import Tape
from memcalc.common.sizes import rounded
from memcalc.nn.model import Network
from memcalc.nn.module import Buffer, Module, Parameter
from memcalc.optim.weight import Weight
from memcalc.setup.setup import TrainingSetup
from memcalc.tables.optimizers import optimizer
from memcalc.training.optimizer_in_backward import StepOnGradient, StepOnNextGradient, step_in_backward
from memcalc.training.traced_step import implementation_of, steps_in_backward
from memcalc.training.trainer_loop import runs_trainer

if TYPE_CHECKING:
    from memcalc.parallel.placement import Placement


def weight_of(parameter: Parameter, copies: int, setup: TrainingSetup, placement: Placement | None) -> Weight:
    """A trained parameter that stands for `copies` alike."""
    by_embedding = runs_trainer(setup) and parameter.group == "embedding"
    device = 0 if placement is None else placement.device(parameter)
    card = device if isinstance(device, int) else 0
    return Weight(
        parameter.shape, parameter.dtype.itemsize, copies, parameter.group, setup.galore_rank, by_embedding, card
    )


def updater_of(tape: Tape, network: Module, setup: TrainingSetup) -> StepOnGradient | None:
    """What steps each weight in backward; None where the optimizer steps after it."""
    if not steps_in_backward(setup):
        return None
    row = optimizer(setup.optimizer)
    updater = (StepOnNextGradient if row.in_backward else StepOnGradient)(tape, row.step[implementation_of(setup)])
    step_in_backward(network, updater)
    return updater


def update_groups(network: Network, setup: TrainingSetup, updated: Sequence[tuple[Parameter, int]]) -> tuple[int, ...]:
    """How many of the `updated` weights the optimizer has in each of its groups, where it has several."""
    if network.input_kind != "latents":
        return ()
    from memcalc.training import trained_text_encoders

    return trained_text_encoders.update_groups(network, setup, updated)


def averaged_weights(tensors: Sequence[tuple[str, Parameter]], setup: TrainingSetup) -> dict[str, int]:
    """The moving average of a denoiser's weights (EMAModel of diffusers): a copy of each."""
    if not setup.use_ema:
        return {}
    weights = [p for _, p in tensors if not isinstance(p, Buffer)]
    return {"EMA of the weights": sum(rounded(p.numel * p.dtype.itemsize) * p.copies for p in weights)}
