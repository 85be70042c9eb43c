"""A ControlNet that is trained in front of a frozen UNet, as diffusers' scripts do.

Source: examples/controlnet/train_controlnet{,_sdxl}.py of diffusers 0.42.1. Accelerate prepares the ControlNet alone:
it runs under autocast and what it returns becomes fp32; the UNet runs in 16 bits outside of it.
"""

from __future__ import annotations

from memcalc import ops
from memcalc.autograd.tape import Tape
from memcalc.autograd.tensor import Tensor
from memcalc.common.assumption import Assumption
from memcalc.errors import UsageError
from memcalc.models.common.denoiser import Denoiser, Picture, given
from memcalc.models.spec import ModelSpec
from memcalc.nn.run_context import run_context
from memcalc.setup.setup import TrainingSetup
from memcalc.tables.dtypes import ALIASES, FP32, DType


def attach_controlnet(model: Denoiser, spec: ModelSpec, setup: TrainingSetup, *, alone: bool) -> list[Assumption]:
    """Freeze `model`, unbound, and make a ControlNet a part of it; returns the assumptions.

    Raises UsageError for denoisers whose ControlNets are not described, and for several GPUs.
    """
    from memcalc.models.families.diffusion.controlnet import controlnet_of
    from memcalc.models.families.diffusion.unet import UNet2DConditionModel

    if not isinstance(model, UNet2DConditionModel):
        raise UsageError(
            f"--controlnet is described for UNets (Stable Diffusion, SDXL), not for {spec.model_type}; leave it out."
        )
    if not alone:
        raise UsageError("--controlnet is computed on one GPU; leave out the options of several.")
    freeze_outside_autocast(model, setup)
    model.controlnet = controlnet_of(spec.config)
    text = "the UNet is frozen in 16 bits and a ControlNet made from it is trained, under autocast by itself"
    return [Assumption("controlnet_trained", f"{text} (--controlnet)")]


def freeze_outside_autocast(model: Denoiser, setup: TrainingSetup) -> None:
    """Freeze `model` in the dtype of --mixed_precision; the scripts run it without autocast."""
    narrow = ALIASES[setup.precision.removeprefix("mixed-")]
    for _, parameter in model.tensors():
        parameter.trainable, parameter.fixed_dtype = False, parameter.fixed_dtype or narrow
    model.frozen_dtype = narrow


def controlled(
    tape: Tape, model: Denoiser, noisy: Tensor, asked: Picture, autocast: DType | None
) -> tuple[Tensor, list[Tensor]]:
    """The UNet's prediction with its ControlNet, and what the loop holds besides."""
    from memcalc.models.families.diffusion.unet import UNet2DConditionModel

    assert isinstance(model, UNet2DConditionModel)
    run = run_context(tape)
    inputs = model.inputs(tape, asked)
    conditioning = given(tape, asked.batch, 3, asked.height, asked.width, name="conditioning pictures")
    assert model.controlnet is not None
    with tape.autocasting(autocast):
        states = model.controlnet(noisy, inputs, conditioning)
    if autocast is not None:
        states = [ops.to(state, FP32) for state in states]
    checkpoints = run.checkpointing
    run.checkpointing = checkpoints and model.added  # the script of Stable Diffusion checkpoints the ControlNet alone
    pred = model.run(noisy, inputs, [ops.to(state, noisy.dtype) for state in states])
    run.checkpointing = checkpoints
    return pred, states
